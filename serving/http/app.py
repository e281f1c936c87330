# SPDX-License-Identifier: Apache-2.0
"""`make_app`: all APIs as one application."""

from http import HTTPStatus

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from metrale_jax.core.errors import shown
from serving.core.errors import ServiceError
from serving.core.incidents import unforeseen
from serving.http import (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages,
    models,
    openapi,
    page,
    probes,
    responses,
    stats,
    tokens,
)
from serving.http.callers import REQUEST_ID_HEADER, peer_of, request_id_of
from serving.http.desk import Desk
from serving.http.errors import ANTHROPIC, OPENAI, HttpFault, headers_of, spelt, status_of
from serving.http.sending import JSON, OWN_HEADERS

APIS = (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages,
    models,
    page,
    probes,
    responses,
    stats,
    tokens,
)
# What records call a method that there is not, whatever it was: names of callers make no series in metrics.
NO_METHOD = "(none)"
SCHEMES = ("http://", "https://")


def make_app(desk: Desk) -> Starlette:
    """The application. What no API serves is an error object too, and so is what should never happen."""

    async def refused(request: Request, raised: Exception) -> Response:
        error = _fault(request, raised)
        desk.service.refused(NO_METHOD, peer_of(request.scope), error)
        return _answer(request.scope, error)

    async def broken(request: Request, raised: Exception) -> Response:
        return _answer(request.scope, unforeseen(raised, NO_METHOD))

    routes = [route for api in APIS for route in api.routes(desk)]
    app = Starlette(
        routes=[*routes, openapi.route_of(desk, routes)],
        middleware=[
            Middleware(UnambiguousHeads),
            Middleware(WholeTargets),
            *([Middleware(KnownHosts, hosts=desk.settings.allowed_hosts)] if desk.settings.allowed_hosts else []),
            *_cross_origin(desk.settings.allowed_origins),
        ],
        exception_handlers={HTTPException: refused, Exception: broken},
    )
    app.router.redirect_slashes = False
    return app


def _cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "retry-after"],
        )
    ]


class UnambiguousHeads:
    """Refuses heads that tell of two ends of their body: what stands before the server may believe the other one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        headers = Headers(scope=scope)
        if "transfer-encoding" not in headers or "content-length" not in headers:
            await self._app(scope, receive, send)
            return
        message = "content-length and transfer-encoding are both given; leave one of them out."
        fault = HttpFault(HTTPStatus.BAD_REQUEST, message, "content-length", {"connection": "close"})
        await _answer(scope, fault)(scope, receive, send)


class WholeTargets:
    """Takes targets with scheme and host, as clients of proxies write them: the host is that of the call, whatever the
    header says (RFC 9112, 3.2.2)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on, its target a path."""
        if scope.get("path", "")[:8].lower().startswith(SCHEMES):
            _, _, rest = scope["path"].partition("://")
            host, slash, path = rest.partition("/")
            raw = slash + scope.get("raw_path", b"").decode("latin-1").partition("://")[2].partition("/")[2]
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "path": "/" + path, "raw_path": raw.encode("latin-1") or b"/"}
            scope["headers"] = [(b"host", host.encode("latin-1", "replace")), *headers]
        await self._app(scope, receive, send)


class KnownHosts:
    """Refuses calls to a name that is none of the server's: a page may have had its own made to lead here."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]):
        self._app, self._hosts = app, frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        given = Headers(scope=scope).get("host", "").lower()
        name = given.partition("]")[0].strip("[") if given.startswith("[") else given.partition(":")[0]
        if name in self._hosts:
            await self._app(scope, receive, send)
            return
        message = f"host {shown(given, 120)} is no name of this server; call it by one, or list it in allowed_hosts."
        await _answer(scope, HttpFault(HTTPStatus.MISDIRECTED_REQUEST, message, "host"))(scope, receive, send)


def _fault(request: Request, raised: HTTPException) -> HttpFault:
    status, path = HTTPStatus(raised.status_code), shown(request.url.path, 120)
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (raised.headers or {}).get("Allow", "")
        message = f"{shown(request.method, 40)} of {path} is not served; use {allowed}."
    else:
        message = f"{path} is not served here; /openapi.json lists what is."
    return HttpFault(status, message, headers=raised.headers)


def _answer(scope: Scope, error: ServiceError) -> Response:
    form = ANTHROPIC if scope["path"].startswith(messages.PATH) else OPENAI
    request_id = request_id_of(Headers(scope=scope))
    headers = headers_of(error) | OWN_HEADERS | {REQUEST_ID_HEADER: request_id}
    return Response(spelt(form.body(error, request_id)), status_of(error), headers, JSON)
