# SPDX-License-Identifier: Apache-2.0
"""`Ingress`: takes calls from Ray's proxies, names the beginnings of their prompts, and passes them to replicas."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.asgi_tunnel import Asked, Head, Headers, passed_on
from serving.config import ServeConfig
from serving.core.errors import ServiceError
from serving.core.keys import KeyRing
from serving.prefix_routing import Link, links_of
from serving.prompt_pieces import PROMPTS, pieces_of

LOG = logging.getLogger(__name__)

MIB = 1 << 20
# How many replicas may die under one call before its caller is told.
MAX_TRIES = 3
# A body of this size is read beside the event loop.
LARGE_BYTES = 256 << 10
# What is asked for again changes nothing.
REPEATABLE = {*PROMPTS, "/v1/embeddings", "/tokenize", "/detokenize"}
# Each replica would have its own.
OF_ONE_SERVER = ("/v1/files", "/v1/batches", "/v1/admin")
STREAM = b"text/event-stream"
GONE = "the server that ran this call has gone; send it again."
FULL = "the servers have no room for this call; send it again later."


@dataclass(frozen=True)
class _Begun:
    """An answer whose first piece is there."""

    head: Head
    first: bytes
    rest: AsyncIterator[bytes]


class _NoAnswer(Exception):
    """Why no replica answered; fit for the caller's eyes."""


class Ingress:
    """A call whose replica dies before a first piece of its answer came is asked of another one; after that the stream
    ends with an error in it."""

    def __init__(self, model: DeploymentHandle, config: ServeConfig):
        self._model = model.options(method_name="answer", stream=True)
        self._keys = KeyRing.open(config.key_file) if config.key_file else KeyRing.anonymous()
        self._max_body_bytes = config.max_message_mib * MIB
        # Digests of prompts mean something in this process only.
        self._secret = secrets.token_bytes(32)

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path.startswith(OF_ONE_SERVER):
            return _error(404, f"{path[:120]} is not served behind Ray, where each replica would have its own.")
        body = await _body(request, self._max_body_bytes)
        if body is None:
            return _error(413, f"the body has more than {self._max_body_bytes} bytes; send less.")
        query, client = request.scope["query_string"], request.client and tuple(request.client)
        asked = Asked(request.method, path, query, passed_on(tuple(request.headers.raw)), body, client)
        try:
            begun = await self._begun(asked, await self._links(request, asked))
        except _NoAnswer as error:
            return _error(503, str(error), {"retry-after": "1"})
        response = StreamingResponse(_pieces(begun), begun.head.status)
        response.raw_headers = list(begun.head.headers)
        return response

    async def _links(self, request: Request, asked: Asked) -> tuple[Link, ...]:
        if asked.path not in PROMPTS:
            return ()

        def made() -> tuple[Link, ...]:
            pieces, salt = pieces_of(asked.path, asked.body)
            return links_of(pieces, f"{self._salt(request)}\0{salt}", self._secret)

        return await asyncio.to_thread(made) if len(asked.body) > LARGE_BYTES else made()

    def _salt(self, request: Request) -> str:
        """What parts the caller's prompts from others'. A key that is unknown is refused by the replica."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        own = token.strip() if scheme.lower() == "bearer" else ""
        try:
            return self._keys.authenticate(own or request.headers.get("x-api-key"), "").salt
        except ServiceError:
            return secrets.token_hex(16)

    async def _begun(self, asked: Asked, links: tuple[Link, ...]) -> _Begun:
        """Raises `_NoAnswer` where nobody gives one."""
        tries = MAX_TRIES if asked.method in ("GET", "HEAD") or asked.path in REPEATABLE else 1
        for number in range(1, tries + 1):
            pieces = self._model.remote(asked, links=links)
            try:
                head = await anext(pieces)
                return _Begun(head, await anext(pieces, b""), pieces)
            except RayActorError as error:
                LOG.warning("a replica has gone before it answered, try %d of %d: %s", number, tries, error)
            except BackPressureError:
                raise _NoAnswer(FULL) from None
            except DeploymentUnavailableError:
                break
            except BaseException:
                pieces.cancel()
                raise
        raise _NoAnswer(GONE)


async def _pieces(begun: _Begun) -> AsyncIterator[bytes]:
    over = False
    try:
        if begun.first:
            yield begun.first
        async for piece in begun.rest:
            yield piece
        over = True
    except RayActorError:
        over = True
        if not _is_stream(begun.head.headers):
            raise  # the connection breaks off, short of what its head promised
        yield f"data: {json.dumps(_object(GONE, 503))}\n\n".encode()
    finally:
        if not over:
            begun.rest.cancel()


def _is_stream(headers: Headers) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(STREAM) for name, value in headers)


async def _body(request: Request, most_bytes: int) -> bytes | None:
    """All of it; None where it is larger."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(_object(message, status), status, headers)


def _object(message: str, status: int) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
