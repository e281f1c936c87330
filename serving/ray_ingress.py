# SPDX-License-Identifier: Apache-2.0
"""`Ingress`: takes calls from Ray's proxies, names the beginnings of their prompts, and passes them to replicas."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serving.asgi_tunnel import Asked, Head, Headers, passed_on
from serving.config import ServeConfig
from serving.core.errors import Kind, ServiceError
from serving.core.keys import KeyRing
from serving.http.callers import caller_of
from serving.http.errors import ANTHROPIC, OPENAI, ErrorForm, HttpFault, headers_of, spelt, status_of
from serving.http.sending import JSON, OWN_HEADERS
from serving.prefix_routing import Link, links_of
from serving.prompt_pieces import PROMPTS, pieces_of

LOG = logging.getLogger(__name__)

MIB = 1 << 20
# How many replicas may die under one call before its caller is told.
MAX_TRIES = 3
# After so long another replica may be there.
RETRY_S = 1.0
# A body of this size is read beside the event loop.
LARGE_BYTES = 256 << 10
# What is asked for again changes nothing.
REPEATABLE = {*PROMPTS, "/v1/embeddings", "/tokenize", "/detokenize"}
# Each replica would have its own.
OF_ONE_SERVER = ("/v1/files", "/v1/batches", "/v1/admin")
STREAM = b"text/event-stream"
GONE = "the server that ran this call has gone; send it again."
FULL = "no server has room for this call; send it again later."


@dataclass(frozen=True)
class _Begun:
    """An answer whose first piece is there."""

    head: Head
    first: bytes
    rest: AsyncIterator[bytes]


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
        try:
            if path.startswith(OF_ONE_SERVER):
                about = (
                    f"{path[:120]} is not served behind Ray, where each replica would have its own; ask a lone server."
                )
                raise HttpFault(HTTPStatus.NOT_FOUND, about)
            body, client = await _body(request, self._max_body_bytes), request.client and tuple(request.client)
            headers, query = passed_on(tuple(request.headers.raw)), request.scope["query_string"]
            asked = Asked(request.method, path, query, headers, body, client)
            begun = await self._begun(asked, await self._links(request, asked))
        except ServiceError as error:
            body = spelt(_form(path).body(error, ""))
            return Response(body, status_of(error), headers_of(error) | OWN_HEADERS, JSON)
        response = StreamingResponse(_pieces(begun, _form(path)), begun.head.status)
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
        try:
            return caller_of(self._keys, request.headers, "").salt
        except ServiceError:
            return secrets.token_hex(16)

    async def _begun(self, asked: Asked, links: tuple[Link, ...]) -> _Begun:
        """Raises `ServiceError` (UNAVAILABLE) where nobody answers."""
        tries = MAX_TRIES if asked.method in ("GET", "HEAD") or asked.path in REPEATABLE else 1
        for number in range(1, tries + 1):
            pieces = self._model.remote(asked, links=links)
            try:
                head = await anext(pieces)
                return _Begun(head, await anext(pieces, b""), pieces)
            except RayActorError as error:
                LOG.warning("a replica has gone before it answered, try %d of %d: %s", number, tries, error)
            except BackPressureError:
                raise ServiceError(Kind.UNAVAILABLE, FULL, retry_after_s=RETRY_S) from None
            except DeploymentUnavailableError:
                break
            except BaseException:
                pieces.cancel()
                raise
        raise ServiceError(Kind.UNAVAILABLE, GONE, retry_after_s=RETRY_S)


async def _pieces(begun: _Begun, form: ErrorForm) -> AsyncIterator[bytes]:
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
        yield form.event(form.body(ServiceError(Kind.UNAVAILABLE, GONE), ""))
    finally:
        if not over:
            begun.rest.cancel()


def _form(path: str) -> ErrorForm:
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI


def _is_stream(headers: Headers) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(STREAM) for name, value in headers)


async def _body(request: Request, most_bytes: int) -> bytes:
    """All of it. Raises `HttpFault` for one that is larger."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            about = f"the body has more than {most_bytes} bytes; send less."
            raise HttpFault(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, about)
        parts.append(part)
    return b"".join(parts)
