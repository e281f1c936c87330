# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions: the answers to a conversation, whole or as they come."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from metrale_jax.results import GenerationResult, TokenLogprob
from metrale_jax.sampling.params import MAX_LOGPROBS
from serving.chat.plan import ChatPlan
from serving.core.calls import GenerateCall, Prompt
from serving.core.events import Delta, Event
from serving.http.answers import (
    Streaming,
    UsageSum,
    body_faults,
    finish_reason,
    label_of,
    merged,
    results_of,
    streaming_of,
    switch,
    was_cut,
)
from serving.http.bodies import text_field
from serving.http.chat_parts import SpokenAnswer
from serving.http.chat_plan import faults_of, plan_chat
from serving.http.chat_schemas import CHAT_ANSWER, CHAT_BODY, CHAT_ENDS
from serving.http.desk import Desk
from serving.http.endpoint import Asked, json_answer, post
from serving.http.errors import with_fields
from serving.http.operations import Operation
from serving.http.schemas import (
    BOOLEAN,
    GENERATION,
    USAGE,
    array,
    body_of,
    integer,
    nullable,
    object_of,
    text,
)
from serving.http.sse import DONE, EventStream, data
from serving.openai_answer import Label, chat_logprobs
from serving.openai_body import names_of

# The service's name for what is wrong, and the body's.
FORM = with_fields({"prompt": "messages"})
BODY = {
    **GENERATION,
    **CHAT_BODY,
    "max_completion_tokens": integer(1),
    "logprobs": BOOLEAN,
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "chat_template_kwargs": {"type": "object"},
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}
CHOICE = object_of(
    {
        "index": integer(0),
        "message": CHAT_ANSWER,
        "logprobs": nullable({"type": "object"}),
        "finish_reason": CHAT_ENDS,
    },
    "index",
    "message",
    "logprobs",
    "finish_reason",
)
ANSWER = {"id": text(), "object": text("chat.completion"), "created": integer(0), "model": text()}
ABOUT = Operation(
    "Answers to a conversation.",
    body_of(BODY, "messages"),
    object_of(ANSWER | {"choices": array(CHOICE), "usage": USAGE}, *ANSWER, "choices", "usage"),
    is_streamed=True,
)


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [post(desk, "/v1/chat/completions", complete, form=FORM, about=ABOUT, names=names_of)]


@dataclass(frozen=True)
class _Work:
    """One request: what is asked, of the service and for the answer."""

    desk: Desk
    asked: Asked
    plan: ChatPlan
    label: Label
    model: str
    streaming: Streaming
    with_ids: bool

    def answer(self) -> SpokenAnswer:
        """A reader for one answer."""
        return SpokenAnswer(self.plan.parser(), self.asked.body.get("functions") is not None)

    @property
    def calls(self) -> list[GenerateCall]:
        """The one call that there is."""
        prompt = Prompt(messages=tuple(self.plan.messages), template=self.plan.template)
        return [GenerateCall(prompt, self.plan.params, self.asked.info(self.model))]


async def complete(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """The answers to the conversation."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        label = label_of(desk, f"chatcmpl-{asked.request_id}", model)
        with_ids = switch(body, "return_token_ids", False)
        streaming = streaming_of(body)
        work = _Work(desk, asked, await plan_chat(desk, body), label, model, streaming, with_ids)
    if work.streaming.wanted:
        return EventStream(_chunks(work), desk.settings.ping_s)
    return await _whole(work)


async def _whole(work: _Work) -> Response:
    usage = UsageSum()
    with faults_of(work.plan):
        [results] = await results_of(work.desk, work.calls, work.asked.caller)
    for result in results:
        usage.add(0, result)
    choices = [_choice(work, index, result) for index, result in enumerate(results)]
    return json_answer(_object(work, "chat.completion", choices) | {"usage": usage.object()})


def _choice(work: _Work, index: int, result: GenerationResult) -> dict[str, Any]:
    answer = work.answer()
    choice = {
        "index": index,
        "message": answer.message(result.text, was_cut(result)),
        "logprobs": chat_logprobs(result.logprobs, work.label),
        "finish_reason": answer.reason(finish_reason(result)),
    }
    if work.with_ids:
        choice |= {"token_ids": list(result.token_ids), "prompt_token_ids": list(result.prompt_token_ids)}
    return choice


async def _chunks(work: _Work) -> AsyncIterator[bytes]:
    params, usage = work.plan.params, UsageSum()
    answers = [work.answer() for _ in range(params.n)]
    begun = False
    with faults_of(work.plan):
        async with aclosing(merged(work.desk, work.calls, work.asked.caller)) as events:
            async for _, event in events:
                if not begun:
                    begun = True
                    for index in range(params.n):
                        yield _chunk(work, index, {"role": "assistant", "content": ""})
                for chunk in _told(work, event, answers[event.index]):
                    yield chunk
                if not isinstance(event, Delta):
                    usage.add(0, event.result)
    if work.streaming.usage:
        yield data(_object(work, "chat.completion.chunk", []) | {"usage": usage.object()})
    yield DONE


def _told(work: _Work, event: Event, answer: SpokenAnswer) -> Iterator[bytes]:
    """The chunks of an event. Log-probabilities go with the first; they may come before their text."""
    if isinstance(event, Delta):
        deltas = answer.feed(event.text)
        if not deltas and (event.logprobs or work.with_ids):
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            ids = event.token_ids if place == 0 else ()
            yield _chunk(work, event.index, delta, event.logprobs if place == 0 else (), ids)
    else:
        for delta in answer.end(was_cut(event.result)):
            yield _chunk(work, event.index, delta)
        yield _chunk(work, event.index, {}, reason=answer.reason(finish_reason(event.result)))


def _chunk(
    work: _Work,
    index: int,
    delta: dict[str, Any],
    logprobs: tuple[TokenLogprob, ...] = (),
    token_ids: tuple[int, ...] = (),
    reason: str | None = None,
) -> bytes:
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": chat_logprobs(logprobs, work.label),
        "finish_reason": reason,
    }
    if work.with_ids:
        choice["token_ids"] = list(token_ids)
    chunk = _object(work, "chat.completion.chunk", [choice])
    return data(chunk | ({"usage": None} if work.streaming.usage else {}))


def _object(work: _Work, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    label = work.label
    return {
        "id": label.id,
        "object": kind,
        "created": label.created,
        "model": label.model,
        "choices": choices,
    }
