# SPDX-License-Identifier: Apache-2.0
"""`Endpoint`: one method of one API as ASGI takes it. Each error is an error object, each call ends with its client."""

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.core.calls import Caller, CallInfo
from serving.core.errors import ServiceError
from serving.core.incidents import foreseen
from serving.http.bodies import IncomingBody, decoded
from serving.http.callers import caller_of, check_request_id, peer_of, request_id_of, timeout_of
from serving.http.calls import Call
from serving.http.desk import Desk
from serving.http.errors import OPENAI, ErrorForm, renamed, spelt
from serving.http.operations import Operation
from serving.http.room import Place
from serving.http.sending import JSON, Outgoing


@dataclass(frozen=True)
class Asked:
    """A call whose caller is known and whose `body` is read ({} where the method takes none). `path` are the parts of
    the path that the route names. `method` is its name in logs and metrics. Nobody waits for it in the `background`."""

    caller: Caller
    request_id: str
    timeout_s: float | None
    method: str
    body: Mapping[str, Any]
    path: Mapping[str, str]
    query: QueryParams
    headers: Headers
    background: bool = False

    def info(self, model: str, part: str = "") -> CallInfo:
        """What goes with a call to the service; `part` tells several calls of one request apart."""
        return CallInfo(model, self.request_id + part, self.method, self.timeout_s, self.background)


UNDESCRIBED = Operation()
# What a body calls fields of `SamplingParams` that have other names there.
Names = Callable[[Mapping[str, Any]], Mapping[str, str]]
Handler = Callable[[Desk, Asked], Awaitable[Response | ASGIApp]]
# What reads a body that is not JSON.
Reader = Callable[[Desk, Caller, Headers, IncomingBody], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Endpoint:
    """What `handle` answers, errors in the `form` of the API. `is_open` asks for no key, `has_body` reads JSON, or
    whatever `read` reads. `about` describes it to readers. One that `is_probe` is answered while the server drains, and
    however many calls there are. `names` are a body's own for what errors call otherwise."""

    desk: Desk
    name: str
    handle: Handler
    form: ErrorForm = OPENAI
    has_body: bool = True
    is_open: bool = False
    is_probe: bool = False
    about: Operation = UNDESCRIBED
    read: Reader | None = None
    names: Names = lambda body: {}
    # What errors are written in for who sends such a header.
    forms: Mapping[str, ErrorForm] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        desk, headers = self.desk, Headers(scope=scope)
        out, body = Outgoing(send, desk.settings.write_s), IncomingBody(headers, receive)
        asked, out.request_id = None, request_id_of(headers)
        try:
            with foreseen(self.name):
                async with Call(desk.calls, desk.settings.max_calls, self.is_probe) as call:
                    asked = await self._asked(scope, headers, body, out)
                    call.watch(receive)
                    answer = await self.handle(desk.pinned(), asked)
                    await answer(scope, receive, out)
        except ServiceError as raised:
            error = raised if asked is None else renamed(raised, self.names(asked.body))
            if not error.recorded:
                desk.service.refused(self.name, peer_of(scope), error)
            if is_pending := body.pending and not out.begun:
                await body.read_away()
            closing = {"connection": "close"} if is_pending or desk.calls.draining else {}
            with suppress(ServiceError), foreseen(self.name):  # who takes nothing is told nothing
                form = next((form for name, form in self.forms.items() if name in headers), self.form)
                await out.fail(scope, form, error, closing)

    async def _asked(self, scope: Scope, headers: Headers, body: IncomingBody, out: Outgoing) -> Asked:
        check_request_id(headers)
        peer = peer_of(scope)
        caller = Caller(peer=peer) if self.is_open else caller_of(self.desk.service, headers, peer)
        timeout_s, read = timeout_of(headers), {}
        # Who waits no longer than that for the answer does not send for longer either.
        body_s = min(self.desk.settings.body_s, timeout_s or math.inf)
        if self.read is not None:
            read = await self.read(self.desk, caller, headers, body)
        elif self.has_body:
            settings = self.desk.settings
            with Place(self.desk.room, settings.max_bodies_bytes) as place:
                read = await decoded(await body.read(settings.max_body_bytes, body_s, place), headers)
        path, query = scope.get("path_params", {}), QueryParams(scope["query_string"])
        return Asked(caller, out.request_id, timeout_s, self.name, read, path, query, headers)


def post(desk: Desk, path: str, handle: Handler, **more: Any) -> Route:
    """The route of a method that takes a JSON object; `more` are fields of its `Endpoint`."""
    return Route(path, Endpoint(desk, path, handle, **more), methods=["POST"])


def get(desk: Desk, path: str, handle: Handler, **more: Any) -> Route:
    """The route of a method that takes no body; `more` are fields of its `Endpoint`."""
    return Route(path, Endpoint(desk, path, handle, has_body=False, **more), methods=["GET"])


def delete(desk: Desk, path: str, handle: Handler, **more: Any) -> Route:
    """The same for DELETE."""
    return Route(path, Endpoint(desk, path, handle, has_body=False, **more), methods=["DELETE"])


def json_answer(value: Any, status: int = 200) -> Response:
    """The value as a whole answer."""
    return Response(spelt(value), status, media_type=JSON)
