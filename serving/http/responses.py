# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses: items in, items out, whole or as semantic events.

Responses are kept in memory unless `store` is false, for their caller only and while there is room; a restart forgets
them. Instructions hold for one response. What a model thinks is an item of type reasoning with its text.
"""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from metrale_jax.results import GenerationResult
from serving.chat.dialects.api import Messages
from serving.chat.plan import Chat, ChatPlan
from serving.chat.reasoning import num_thought
from serving.chat.tools import ChatTools
from serving.core.calls import GenerateCall, Prompt
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.http import responses_kept
from serving.http.answers import body_faults, known_only, label_of, results_of, switch, was_cut
from serving.http.bodies import text_field
from serving.http.chat_plan import faults_of, planned
from serving.http.chat_schemas import RESPONSES_ABOUT
from serving.http.desk import Desk
from serving.http.endpoint import Asked, json_answer, post
from serving.http.errors import openai_body
from serving.http.response_store import ResponseStore, Stored
from serving.http.responses_body import (
    KNOWN,
    check_rest,
    input_of,
    instructions_of,
    names_of,
    params_of,
    reasoning_of,
    refuse_logprobs,
    tools_of,
)
from serving.http.responses_kept import input_items
from serving.http.responses_output import Output, messages_of
from serving.http.sse import EventStream
from serving.openai_answer import Label, chat_logprobs

PATH = "/v1/responses"
# What a chat begins with.
NONE = Stored({"output": []}, [])


def routes(desk: Desk) -> list[Route]:
    """The routes of this API, which share what they keep."""
    store = ResponseStore()
    making = post(desk, PATH, partial(create, store), about=RESPONSES_ABOUT, names=names_of)
    return [making, *responses_kept.routes(desk, store)]


@dataclass(frozen=True)
class _Work:
    """One request: what is asked, what the answer says of itself, and the chat so far without instructions, with
    the items that it is made from."""

    store: ResponseStore
    desk: Desk
    asked: Asked
    plan: ChatPlan
    tools: ChatTools
    messages: Messages
    items: list[dict[str, Any]]
    model: str
    name: str
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def call(self) -> GenerateCall:
        """What the service is asked."""
        prompt = Prompt(messages=self.plan.messages, template=self.plan.template)
        return GenerateCall(prompt, self.plan.params, self.asked.info(self.model))

    @cached_property
    def label(self) -> Label:
        """How tokens are spelt."""
        return label_of(self.desk, self.id, self.model)

    def response(self, status: str, output: Output, **more: Any) -> dict[str, Any]:
        """The response object."""
        body = self.asked.body
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        empty = {"error": None, "incomplete_details": None, "usage": None}
        items = {"model": self.name, "output": [dict(item) for item in output.items]}
        return {**head, **empty, **items, **_said(body, self.tools), **more}

    def ended(self, output: Output, result: GenerationResult) -> dict[str, Any]:
        """The response object of the whole answer, which is kept if it is to be."""
        thoughts, thinking = 0, self.plan.thinking
        if thinking is not None and any(item["type"] == "reasoning" for item in output.items):
            thoughts = num_thought(thinking, result.token_ids, self.label.token_bytes)
        more = {"usage": _usage(result, thoughts)}
        status = "completed"
        if was_cut(result):
            status, more["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        whole = self.response(status, output, **more)
        if whole["store"]:
            stored = Stored(whole, [*self.messages, *messages_of(output.items)], self.items)
            self.store.put(self.asked.caller.key_id, stored)
        return whole


async def create(store: ResponseStore, desk: Desk, asked: Asked) -> Response | ASGIApp:
    """The next response of a chat."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        known_only(body, KNOWN)
        check_rest(body)
        streams, params, tools = switch(body, "stream", False), params_of(body), tools_of(body)
        before = text_field(body, "previous_response_id")
        earlier = store.get(asked.caller.key_id, before, "previous_response_id") if before else NONE
        messages = input_of(body, earlier.messages)
        items = [*earlier.items, *earlier.response["output"], *input_items(body["input"])]
        chat = Chat([*instructions_of(body), *messages], tools, reasoning_of(body))
        plan = await planned(desk, chat, params)
        refuse_logprobs(body, plan)
    name = model or "".join(card.id for card in desk.model.models()[:1])
    work = _Work(store, desk, asked, plan, tools, messages, items, model, name)
    if streams:
        return EventStream(_events(work), desk.settings.ping_s)
    with faults_of(plan):
        [[result]] = await results_of(desk, [work.call], asked.caller)
    parser, output = plan.parser(), Output()
    status = _item_status(result)
    output.give(chat_logprobs(result.logprobs, work.label))
    list(output.of(parser.feed(result.text)))
    list(output.of(parser.end(was_cut(result)), status))
    list(output.closed(status))
    return json_answer(work.ended(output, result))


async def _events(work: _Work) -> AsyncIterator[bytes]:
    parser, output, begun = work.plan.parser(), Output(), False
    try:
        with faults_of(work.plan):
            async with aclosing(work.desk.model.generate(work.call, work.asked.caller)) as events:
                async for event in events:
                    if not begun:
                        begun = True
                        for name in ("created", "in_progress"):
                            yield output.event(f"response.{name}", response=work.response("in_progress", output))
                    if isinstance(event, Delta):
                        output.give(chat_logprobs(event.logprobs, work.label))
                        for told in output.of(parser.feed(event.text)):
                            yield told
                        continue
                    status = _item_status(event.result)
                    for told in (*output.of(parser.end(was_cut(event.result)), status), *output.closed(status)):
                        yield told
                    whole = work.ended(output, event.result)
                    yield output.event(f"response.{whole['status']}", response=whole)
    except ServiceError as error:
        if not begun or error.kind is Kind.CANCELLED:
            raise
        work.desk.service.refused(work.asked.method, work.asked.caller.peer, error)
        told = openai_body(error, "")["error"]
        fault = {"code": "server_error", "message": told["message"]}
        for ended in output.closed("incomplete"):
            yield ended
        yield output.event("response.failed", response=work.response("failed", output, error=fault, store=False))


def _item_status(result: GenerationResult) -> str:
    """How the last item ends that nothing else has ended."""
    return "incomplete" if was_cut(result) else "completed"


def _said(body: Mapping[str, Any], tools: ChatTools) -> dict[str, Any]:
    """What a response repeats of the body."""
    named = {"instructions": None, "max_output_tokens": None, "previous_response_id": None, "user": None}
    given = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "metadata": {}, "store": True}
    listed = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.schema,
            "strict": tool.strict,
        }
        for tool in tools.tools
    ]
    effort = (body.get("reasoning") or {}).get("effort")
    return {
        **{name: other if body.get(name) is None else body[name] for name, other in (named | given).items()},
        "background": False,
        "parallel_tool_calls": tools.parallel,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": {"type": "text"}} | dict(body.get("text") or {}),
        "tools": listed,
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
    }


def _usage(result: GenerationResult, thoughts: int) -> dict[str, Any]:
    used = result.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": used.prompt_tokens + used.generated_tokens,
    }
