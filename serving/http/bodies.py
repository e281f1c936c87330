# SPDX-License-Identifier: Apache-2.0
"""Bodies of calls: read up to a limit and for so long, decoded strictly. What is no JSON object is an error."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.http.errors import HttpFault
from serving.http.room import Place

# What is read of a body that nobody wants, so that its sender comes to read why; then the connection is closed.
AWAY_BYTES, AWAY_S = 64 << 20, 5.0
# A body that is larger waits until there is room for it, and is decoded beside the event loop.
LARGE_BYTES = 64 << 10
NO_ROOM_RETRY_S = 5.0
# What JSON calls its values; the others are numbers.
KINDS = MappingProxyType({type(None): "null", bool: "a truth", str: "a string", list: "an array"})
# Python's own bound on them; its message tells programmers how to raise it.
TOO_MANY_DIGITS = "set_int_max_str_digits"


class IncomingBody:
    """The body of one call, as it comes. `pending` says whether there may be more of it."""

    def __init__(self, headers: Headers, receive: Receive):
        self._receive = receive
        self._length = _length(headers)
        self.pending = self._length != 0
        self._is_slow = False
        # Who waits to be told to go on has sent nothing yet, and need not.
        self._waits = headers.get("expect", "").lower() == "100-continue"

    async def read(self, max_bytes: int, seconds: float, place: Place) -> bytes | bytearray:
        """All of it, in its place. Raises `ServiceError` for one that is too large, comes too slowly, breaks off, or
        gets no place."""
        if self._length is not None and self._length > max_bytes:
            raise too_large(max_bytes)
        whole = bytearray()
        try:
            async with asyncio.timeout(seconds):
                if (self._length or 0) > LARGE_BYTES:
                    await place.take(self._length)
                while self.pending:
                    whole += await self._next()
                    if len(whole) > max_bytes:
                        raise too_large(max_bytes)
                    if len(whole) > LARGE_BYTES:
                        await place.take(max_bytes)
        except TimeoutError:
            if place.is_waiting:
                message = f"Other bodies took all the room for {seconds:.3g} s; come again in a moment."
                raise ServiceError(Kind.UNAVAILABLE, message, retry_after_s=NO_ROOM_RETRY_S) from None
            raise self._late(seconds) from None
        return whole

    async def chunks(self, max_bytes: int, seconds: float) -> AsyncIterator[bytes]:
        """All of it, as it comes. What its taker does meanwhile does not count. Raises as `read` does."""
        if self._length is not None and self._length > max_bytes:
            raise too_large(max_bytes)
        loop, taken = asyncio.get_running_loop(), 0
        until_s = loop.time() + seconds
        while self.pending:
            try:
                async with asyncio.timeout_at(until_s):
                    chunk = await self._next()
            except TimeoutError:
                raise self._late(seconds) from None
            came_s = loop.time()
            taken += len(chunk)
            if taken > max_bytes:
                raise too_large(max_bytes)
            yield chunk
            until_s += loop.time() - came_s

    def _late(self, seconds: float) -> ServiceError:
        self._is_slow = True
        return ServiceError(Kind.TOO_LATE, f"The body was not whole after {seconds:.3g} s; send it faster, or less.")

    async def read_away(self) -> None:
        """Takes what is still on its way, within bounds, and forgets it; nothing of what came too slowly, or of what
        waits to be asked for."""
        taken = 0
        with suppress(TimeoutError, ServiceError):
            async with asyncio.timeout(AWAY_S):
                while self.pending and not (self._is_slow or self._waits) and taken < AWAY_BYTES:
                    taken += len(await self._next())

    async def _next(self) -> bytes:
        self._waits = False
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.pending = False
            raise ServiceError(Kind.CANCELLED, "The client went before its request was whole.")
        self.pending = message.get("more_body", False)
        return message.get("body", b"")


async def decoded(raw: bytes | bytearray, headers: Headers) -> dict[str, Any]:
    """The object that the body is. Raises `ServiceError` for one of another type, for what is no JSON, and for what
    JSON allows and readers disagree about: names that come twice, halves of surrogate pairs, numbers out of range."""
    _check_type(headers)
    value = await asyncio.to_thread(_parsed, raw) if len(raw) > LARGE_BYTES else _parsed(raw)
    if not isinstance(value, dict):
        raise _invalid(f"the body holds {KINDS.get(type(value), 'a number')}, no object; send one object")
    return value


def text_field(body: Mapping[str, Any], name: str) -> str:
    """The text of that name, "" where there is none. Raises `ServiceError` for what is no text."""
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ServiceError(Kind.INVALID, f"{name}={shown(value, 80)} is no text; give one.", field=name)
    return value


def too_large(max_bytes: int) -> HttpFault:
    """The error for a body over the limit."""
    message = f"The body is larger than {max_bytes} bytes, which is the limit here; send less."
    return HttpFault(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _length(headers: Headers) -> int | None:
    """What the head says of it; None where it says nothing and there is a body all the same."""
    if "transfer-encoding" in headers:
        return None
    return int(headers.get("content-length", 0))


def _check_type(headers: Headers) -> None:
    # Browsers send this type to strangers only after asking them.
    kind, _, rest = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        message = f"content-type={shown(kind, 80)} is not served; send application/json."
        raise HttpFault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "content-type")
    name, _, charset = rest.partition("=")
    if name.strip().lower() == "charset" and charset.strip().strip('"').lower() not in ("utf-8", "utf8"):
        message = f"charset={shown(charset, 80)} is not served; send UTF-8."
        raise HttpFault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "content-type")
    coding = headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        message = f"content-encoding={shown(coding, 80)} is not served; send the body as it is."
        raise HttpFault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "content-encoding")


def _parsed(raw: bytes | bytearray) -> Any:
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} of the body is no UTF-8; send UTF-8") from None
    except UnicodeEncodeError:
        raise _invalid("the body holds half of a surrogate pair; send the character, or both halves") from None
    except RecursionError:
        raise _invalid("the body is nested too deeply; send a flatter one") from None
    except ValueError as error:
        fault = "it has an integer of thousands of digits" if TOO_MANY_DIGITS in str(error) else shown(str(error), 120)
        raise _invalid(f"the body is no JSON ({fault}); send one object") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name, 60)} is there twice in one object")
        made[name] = value
    return made


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits, 40)} is out of range")
    return value


def _invalid(fault: str) -> ServiceError:
    return ServiceError(Kind.INVALID, f"{fault[0].upper()}{fault[1:]}.")
