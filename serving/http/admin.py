# SPDX-License-Identifier: Apache-2.0
"""/v1/admin: which model serves, for keys that may change it: load, unload, and how far that is."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from metrale_jax.core.errors import shown
from serving.core.calls import LoadCall, UnloadCall
from serving.core.changes import ChangeStatus, ModelStatus
from serving.core.errors import Kind, ServiceError
from serving.http.answers import known_only, switch
from serving.http.bodies import text_field
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer, post
from serving.http.models import model_object
from serving.http.sse import DONE, EventStream, named

HOW_FIELDS = ("grace_s", "wait", "stream")
LOAD_FIELDS = ("model", "served_name", "options", "drain_first", *HOW_FIELDS)
ACCEPTED = 202
MAX_GRACE_S = 86400


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        post(desk, "/v1/admin/load", load),
        post(desk, "/v1/admin/unload", unload),
        get(desk, "/v1/admin/status", status),
    ]


@dataclass(frozen=True)
class _How:
    """How the caller wants to hear of it: when it is there, as it goes, or neither."""

    wait: bool
    stream: bool


async def load(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """Loads a model beside the one that serves, or in its place."""
    body = asked.body
    known_only(body, LOAD_FIELDS)
    how, options = _how(body), {} if body.get("options") is None else body["options"]
    if not isinstance(options, dict):
        raise _fault("options", options, "is no object; give one, or leave it out")
    drain_first = None if body.get("drain_first") is None else switch(body, "drain_first", False)
    call = LoadCall(text_field(body, "model"), text_field(body, "served_name"), options, drain_first, _grace_s(body))
    return await _changed(desk, asked, how, desk.service.load_model(call, asked.caller))


async def unload(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """Unloads the model that serves."""
    known_only(asked.body, HOW_FIELDS)
    how, call = _how(asked.body), UnloadCall(_grace_s(asked.body))
    return await _changed(desk, asked, how, desk.service.unload_model(call, asked.caller))


async def status(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """How things stand; with `?stream=true` again whenever that is different, until no change is under way."""
    now = desk.service.model_status(asked.caller)
    if asked.query.get("stream") == "true":
        return EventStream(_watched(desk, asked), desk.settings.ping_s)
    return json_answer(status_object(now))


async def _changed(desk: Desk, asked: Asked, how: _How, change: Coroutine[Any, Any, ModelStatus]) -> Response | ASGIApp:
    asking = asyncio.create_task(change)
    try:
        await asyncio.sleep(0)  # whatever is refused is refused at once
        if asking.done() or (how.wait and not how.stream):
            return json_answer(status_object(await _in_time(asking, asked.timeout_s)))
        if how.stream:
            return EventStream(_watched(desk, asked), desk.settings.ping_s)
        return json_answer(status_object(desk.service.model_status(asked.caller)), ACCEPTED)
    finally:
        asking.cancel()  # who asks no longer takes nothing back


async def _in_time(asking: "asyncio.Task[ModelStatus]", timeout_s: float | None) -> ModelStatus:
    try:
        async with asyncio.timeout(timeout_s):
            return await asking
    except TimeoutError:
        message = f"{timeout_s:.3g} s passed, and the change goes on; ask for its status."
        raise ServiceError(Kind.TOO_LATE, message) from None


async def _watched(desk: Desk, asked: Asked) -> AsyncIterator[bytes]:
    async with aclosing(desk.service.model_changes(asked.caller)) as changes:
        async for now in changes:
            yield named("status", status_object(now))
    yield DONE


def status_object(status: ModelStatus) -> dict[str, Any]:
    """The status as JSON."""
    model = None if status.model is None else model_object(status.model)
    changes = {name: _change_object(getattr(status, name)) for name in ("change", "last_change")}
    return {
        "object": "model_status",
        "state": status.state,
        "reason": status.reason,
        "model": model,
        "loadable": list(status.loadable),
        "calls": status.calls,
        **changes,
    }


def _change_object(change: ChangeStatus | None) -> dict[str, Any] | None:
    return None if change is None else asdict(change) | {"seconds": round(change.seconds, 3)}


def _how(body: Mapping[str, Any]) -> _How:
    return _How(switch(body, "wait", True), switch(body, "stream", False))


def _grace_s(body: Mapping[str, Any]) -> float | None:
    value = body.get("grace_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_GRACE_S:
        raise _fault("grace_s", value, f"is no number of seconds from 0 to {MAX_GRACE_S}; give one, or leave it out")
    return float(value)


def _fault(name: str, value: Any, fault: str) -> ServiceError:
    return ServiceError(Kind.INVALID, f"{name}={shown(value, 80)} {fault}.", field=name)
