# SPDX-License-Identifier: Apache-2.0
"""/health, /ready and /metrics, as on the side port; here metrics are for callers, and reasons stay in the journal."""

from starlette.responses import Response
from starlette.routing import Route

from serving.core.lifecycle import State
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer
from serving.http.operations import Operation
from serving.http.schemas import object_of, text

# The process has nothing more to give in these states, and whoever watches it should start another.
DEAD = (State.FAILED, State.STOPPED)
STATES = text(*(state.value for state in State))
STATE = Operation("Where the server stands.", answer=object_of({"state": STATES}, "state"), more=(503,))

FIGURES = Operation("Figures for Prometheus.", media="text/plain", answer=text())
# Series of keys, which are one for each caller.
OF_KEYS = b"metrale_key_"


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        get(desk, "/health", health, is_open=True, is_probe=True, about=STATE),
        get(desk, "/ready", ready, is_open=True, is_probe=True, about=STATE),
        get(desk, "/metrics", metrics, is_probe=True, about=FIGURES),
    ]


async def health(desk: Desk, asked: Asked) -> Response:
    """200 while the process is good for anything."""
    state = desk.lifecycle.state
    return _state(state, state not in DEAD)


async def ready(desk: Desk, asked: Asked) -> Response:
    """200 while calls are answered."""
    state = desk.lifecycle.state
    return _state(state, state is State.SERVING)


async def metrics(desk: Desk, asked: Asked) -> Response:
    """The figures for Prometheus. Those of each key are for keys that call themselves admin, and on the side port."""
    body, content_type = desk.metrics()
    if asked.caller.key_id and not asked.caller.admin:
        body = b"".join(line for line in body.splitlines(True) if OF_KEYS not in line.partition(b"{")[0])
    return Response(body, media_type=content_type)


def _state(state: State, good: bool) -> Response:
    return json_answer({"state": state.value}, 200 if good else 503)
