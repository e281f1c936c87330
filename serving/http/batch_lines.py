# SPDX-License-Identifier: Apache-2.0
"""Lines of a batch: how they are checked, and how each is answered as the API of its url answers a live call."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, QueryParams

from metrale_jax.core.errors import RequestError, shown
from serving.batch.records import Origin
from serving.batch.requests import BadLine, openai_body, seed_of
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.incidents import foreseen
from serving.http import chat, completions, embeddings, responses
from serving.http.desk import Desk
from serving.http.endpoint import Asked, Endpoint
from serving.http.errors import renamed, status_of

APIS = (chat, completions, embeddings, responses)
# What batches' calls are named in logs and metrics.
METHOD = "/v1/batches"
# Those that draw tokens: their lines have a seed, so that a line that is run again says the same, and a priority behind
# every live call's that names none.
DRAWING = ("/v1/chat/completions", "/v1/completions", responses.PATH)
PRIORITY = 1_000_000


def endpoints(desk: Desk) -> dict[str, Endpoint]:
    """The methods that lines may call, by their urls."""
    routes = [route for api in APIS for route in api.routes(desk)]
    return {route.path: route.endpoint for route in routes if "POST" in route.methods}


@dataclass(frozen=True)
class LineJob:
    """A line that can be answered."""

    origin: Origin
    body: Mapping[str, Any]
    num_bytes: int

    @property
    def sort_key(self) -> tuple[str, int]:
        """Prompts compare as they begin."""
        asked = next((self.body[name] for name in ("messages", "prompt", "input") if name in self.body), None)
        return json.dumps(asked), self.origin.line

    @property
    def num_answers(self) -> int:
        """About how many sequences it takes; what is no number is refused later."""
        asked = [self.body.get(name) for name in ("n", "best_of")]
        return max([1, *(value for value in asked if isinstance(value, int))])


class LineCheck:
    """Makes jobs of lines that call `url`, all with one model; `model` is its name, "" where none gives one."""

    def __init__(self, url: str):
        self._url = url
        self._first: Origin | None = None
        self.model = ""

    def __call__(self, origin: Origin, record: Mapping[str, Any], num_bytes: int) -> LineJob:
        """The job of a line. Raises `BadLine`."""
        try:
            if not origin.openai:
                raise RequestError("the line has no custom_id, method, url and body; give these, and nothing else.")
            _, body = openai_body(record, (self._url,))
            model = body.get("model") or ""
            if not isinstance(model, str):
                raise RequestError(f"model={shown(model, 80)} is no text; give the model's name.")
        except RequestError as error:
            raise BadLine("invalid_request", str(error), origin) from None
        if self._first is None:
            self._first, self.model = origin, model
        if model != self.model:
            message = f"model={shown(model, 80)} is not that of line {self._first.line}; give all lines one model."
            raise BadLine("mismatched_model", message, origin)
        return LineJob(origin, body, num_bytes)


async def live_answer(
    desk: Desk, endpoint: Endpoint, job: LineJob, caller: Caller, model: str, request_id: str
) -> tuple[int, dict[str, Any]]:
    """Status and body of what a live call of this line would get. Raises `ServiceError` where another time may do."""
    body = {**job.body, "model": model}
    if endpoint.name in DRAWING:
        body["priority"] = _behind(body.get("priority"))
        if body.get("seed") is None:
            body["seed"] = seed_of(job.origin)
    if endpoint.name == responses.PATH:
        body["store"] = False  # nobody else finds what a batch keeps
    asked = Asked(
        caller, request_id, None, METHOD, body, path={}, query=QueryParams(""), headers=Headers(), background=True
    )
    try:
        with foreseen(METHOD):
            response = await endpoint.handle(desk, asked)
            return response.status_code, json.loads(response.body)
    except ServiceError as error:
        if is_passing(error):
            raise
        desk.service.refused(METHOD, caller.peer, error)
        return status_of(error), endpoint.form.body(renamed(error, endpoint.names(body)), request_id)


def is_passing(error: ServiceError) -> bool:
    """Whether the same line may be answered at another time, or by the model when it is there again."""
    is_model = error.kind is Kind.NOT_FOUND and error.field == "model"
    return is_model or error.kind in (Kind.UNAVAILABLE, Kind.EXHAUSTED, Kind.TOO_LATE, Kind.UNAUTHENTICATED)


def _behind(given: Any) -> Any:
    # What is no priority stays, to be refused.
    own = 0 if given is None else given
    return max(own, PRIORITY) if isinstance(own, int) and not isinstance(own, bool) else given
