# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept: one of them whole or told again as events, the items that it was made from, and its end."""

import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.http.chat_schemas import FORGET_ABOUT, INPUT_ITEMS_ABOUT, SHOW_ABOUT
from serving.http.desk import Desk
from serving.http.endpoint import Asked, delete, get, json_answer
from serving.http.paging import known_query, one_of, page, whole_number
from serving.http.response_store import ResponseStore
from serving.http.responses_output import Output
from serving.http.sse import EventStream

ONE = "/v1/responses/{response_id}"
ITEMS = f"{ONE}/input_items"
SHOWN = ("stream", "starting_after", "include", "include_obfuscation")
DEFAULT_ITEMS, MAX_ITEMS = 20, 100
MAX_EVENT = 10**9 - 1
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
# Clients write the members of a list under such names.
_PLACE = re.compile(r"\[\d*\]$")


def routes(desk: Desk, store: ResponseStore) -> list[Route]:
    """The routes to what `store` keeps."""
    return [
        get(desk, ONE, partial(show, store), about=SHOW_ABOUT),
        delete(desk, ONE, partial(forget, store), about=FORGET_ABOUT),
        get(desk, ITEMS, partial(list_items, store), about=INPUT_ITEMS_ABOUT),
    ]


async def show(store: ResponseStore, desk: Desk, asked: Asked) -> Response | ASGIApp:
    """A response that is kept."""
    query = asked.query
    known_query([_PLACE.sub("", name) for name in query], SHOWN)
    streams = one_of("stream", query.get("stream", "false").lower(), ("true", "false")) == "true"
    response = store.get(asked.caller.key_id, asked.path["response_id"]).response
    if not streams:
        return json_answer(response)
    after = query.get("starting_after")
    begin = 0 if after is None else whole_number("starting_after", after, 0, MAX_EVENT) + 1
    return EventStream(_events(response, begin), desk.settings.ping_s)


async def forget(store: ResponseStore, desk: Desk, asked: Asked) -> Response:
    """Keeps a response no longer."""
    response_id = asked.path["response_id"]
    store.delete(asked.caller.key_id, response_id)
    return json_answer({"id": response_id, "object": "response", "deleted": True})


async def list_items(store: ResponseStore, desk: Desk, asked: Asked) -> Response:
    """The items that a response was made from, the last one first unless the order is asc."""
    query = asked.query
    known_query([_PLACE.sub("", name) for name in query], ("after", "limit", "order", "include"))
    limit = whole_number("limit", query.get("limit", DEFAULT_ITEMS), 1, MAX_ITEMS)
    order = one_of("order", query.get("order", "desc"), ("asc", "desc"))
    items = store.get(asked.caller.key_id, asked.path["response_id"]).items
    items = items if order == "asc" else items[::-1]
    return json_answer(page(items, lambda item: item["id"], dict, query.get("after"), limit))


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of a checked input, each with an id and its content in parts."""
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(one) for one in listed]


def _item(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type", "message")
    made = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "completed"}
    made |= {name: value for name, value in given.items() if value is not None}
    if kind == "reasoning":
        made.setdefault("summary", [])
    if kind == "message" and isinstance(made.get("content"), str):
        is_answer = given["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        made["content"] = [{**part, "text": made["content"]}]
    return made


async def _events(response: Mapping[str, Any], begin: int) -> AsyncIterator[bytes]:
    """The events that told of the response, from number `begin` on; each text is one piece."""
    for event in _told(response)[begin:]:
        yield event


def _told(response: Mapping[str, Any]) -> list[bytes]:
    items = response["output"]
    output = Output(item["id"] for item in items)
    begun = {**response, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    events = [output.event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
    for item in items:
        events += output.again(item)
    return [*events, output.event(f"response.{response['status']}", response=response)]
