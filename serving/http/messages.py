# SPDX-License-Identifier: Apache-2.0
"""Anthropic's /v1/messages and /v1/messages/count_tokens.

Where the model thinks, an answer has blocks of thinking whether they were asked for or not; their signature is empty.
What it thinks counts towards `max_tokens`; a `budget_tokens` is checked and passed over.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from metrale_jax.core.errors import shown
from metrale_jax.results import GenerationResult, Usage
from metrale_jax.sampling.params import SamplingParams
from serving.chat.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from serving.chat.plan import ChatPlan
from serving.chat.writer import merged
from serving.core.calls import GenerateCall, Prompt, TokenizeCall
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.http.answers import body_faults, finish_reason, known_only, results_of, switch, was_cut
from serving.http.bodies import text_field
from serving.http.callers import VERSION_HEADER
from serving.http.chat_plan import faults_of, planned
from serving.http.chat_schemas import COUNT_ABOUT, MESSAGES_ABOUT
from serving.http.desk import Desk
from serving.http.endpoint import Asked, json_answer, post
from serving.http.errors import ANTHROPIC
from serving.http.messages_body import KNOWN, chat_of, names_of, params_of
from serving.http.sse import EventStream, named
from serving.passed_over import MESSAGES_REFUSED, refuse

# A member's key and colon, and the comma behind its value.
_KEY, _COMMA = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*'), re.compile(r"\s*,")
PATH = "/v1/messages"
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        post(desk, PATH, answer, form=ANTHROPIC, about=MESSAGES_ABOUT, names=names_of),
        post(desk, f"{PATH}/count_tokens", count, form=ANTHROPIC, about=COUNT_ABOUT),
    ]


@dataclass(frozen=True)
class _Work:
    """One request: what is asked, and what the answer says of itself."""

    desk: Desk
    asked: Asked
    plan: ChatPlan
    model: str
    name: str
    stops: tuple[str, ...]

    @property
    def call(self) -> GenerateCall:
        """What the service is asked."""
        return GenerateCall(_prompt(self.plan), self.plan.params, self.asked.info(self.model))

    def message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The message object."""
        head = {"id": f"msg_{self.asked.request_id}", "type": "message", "role": "assistant", "model": self.name}
        return {**head, "content": content, **ending, "usage": usage}

    def ending(self, result: GenerationResult, called: bool) -> dict[str, Any]:
        """Why the answer ended."""
        reason = finish_reason(result)
        stop = self._stop(result) if reason == "stop" else None
        if reason == "length":
            name = "max_tokens"
        elif stop is not None:
            name = "stop_sequence"
        else:
            name = "tool_use" if called else "end_turn"
        return {"stop_reason": name, "stop_sequence": stop}

    def _stop(self, result: GenerationResult) -> str | None:
        """The stop sequence that ended it, if one did: the first that is complete by its last token."""
        ends = {token for card in self.desk.model.models() for token in card.eos_token_ids}
        if not self.stops or not result.token_ids or result.token_ids[-1] in ends:
            return None
        longest = max(map(len, self.stops))
        spelt = [self.desk.model.token_text(token)[1] for token in result.token_ids[-longest - 4 :]]
        text, before = b"".join(spelt), len(b"".join(spelt[:-1]))
        found = []
        for stop in self.stops:
            word = stop.encode()
            place = text.find(word, max(0, before - len(word) + 1))
            if place >= 0:
                found.append((place + len(word), -len(word), stop))
        return min(found, default=(0, 0, None))[2]


async def answer(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """The next message of a chat, whole or as it comes."""
    body, model = _checked(asked)
    with body_faults():
        known_only(body, KNOWN)
        refuse(body, MESSAGES_REFUSED)
        streams, params = switch(body, "stream", False), params_of(body)
        plan = await planned(desk, chat_of(body), params)
        name = model or "".join(card.id for card in desk.model.models()[:1])
        work = _Work(desk, asked, plan, model, name, tuple(params.stop))
    if streams:
        return EventStream(_events(work), desk.settings.ping_s)
    with faults_of(plan):
        [[result]] = await results_of(desk, [work.call], asked.caller)
    parser = plan.parser()
    content = blocks_of(parser.feed(result.text) + parser.end(was_cut(result)))
    called = any(block["type"] == "tool_use" for block in content)
    return json_answer(work.message(content, work.ending(result, called), _usage(result.usage)))


async def count(desk: Desk, asked: Asked) -> Response:
    """How many tokens a prompt has."""
    body, model = _checked(asked)
    with body_faults():
        known_only(body, KNOWN)
        refuse(body, MESSAGES_REFUSED)
        plan = await planned(desk, chat_of(body), SamplingParams())
    ids = await desk.model.tokenize(TokenizeCall(_prompt(plan), asked.info(model)), asked.caller)
    return json_answer({"input_tokens": len(ids)})


def blocks_of(parts: list[Part]) -> list[dict[str, Any]]:
    """The content blocks of a whole answer. Of arguments that broke off, an input has the members that are whole."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in merged(parts):
        if isinstance(part, Content | Reasoning):
            blocks.append(_opened(part) | {_DELTAS[type(part)][1]: part.text})
        elif isinstance(part, CallBegun):
            blocks.append(_opened(part))
            arguments = ""
        elif isinstance(part, CallArguments):
            arguments += part.text
        elif isinstance(part, CallEnded):
            blocks[-1] = _with_input(blocks[-1], arguments)
    return blocks


def _with_input(block: dict[str, Any], arguments: str) -> dict[str, Any]:
    try:
        return block | {"input": json.loads(arguments)}
    except (ValueError, RecursionError):
        return block | {"input": _whole_members(arguments)}


def _whole_members(arguments: str) -> dict[str, Any]:
    """The members of an object that is cut off, up to the last that a comma ends."""
    decoder, members, place = json.JSONDecoder(), {}, 1
    while found := _KEY.match(arguments, place):
        try:
            value, end = decoder.raw_decode(arguments, found.end())
        except (ValueError, RecursionError):
            break
        ended = _COMMA.match(arguments, end)
        if ended is None:
            break
        members[json.loads(found[1])] = value
        place = ended.end()
    return members


# The name of a delta and of its text, by what it is of.
_DELTAS = {
    Content: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    CallArguments: ("input_json_delta", "partial_json"),
}


def _opened(part: Part) -> dict[str, Any]:
    """The block that begins with this part, still empty."""
    if isinstance(part, CallBegun):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class BlockEvents:
    """The events of an answer's blocks: one is open at a time."""

    def __init__(self):
        self._index, self._kind = -1, None
        self.called = False

    def of(self, parts: list[Part]) -> Iterator[bytes]:
        """The events of these parts."""
        for part in parts:
            if isinstance(part, CallEnded):
                yield from self.closed()
                continue
            kind = CallArguments if isinstance(part, CallBegun) else type(part)
            if kind is not self._kind or isinstance(part, CallBegun):
                yield from self.closed()
                self._index, self._kind = self._index + 1, kind
                self.called = self.called or kind is CallArguments
                yield _event("content_block_start", index=self._index, content_block=_opened(part))
            if not isinstance(part, CallBegun):
                name, text = _DELTAS[type(part)]
                yield _event("content_block_delta", index=self._index, delta={"type": name, text: part.text})

    def closed(self) -> Iterator[bytes]:
        """The end of the block that is open, if one is."""
        if self._kind is not None:
            self._kind = None
            yield _event("content_block_stop", index=self._index)


async def _events(work: _Work) -> AsyncIterator[bytes]:
    parser, blocks, begun = work.plan.parser(), BlockEvents(), False
    with faults_of(work.plan):
        async with aclosing(work.desk.model.generate(work.call, work.asked.caller)) as events:
            async for event in events:
                if not begun:
                    begun = True
                    ending = {"stop_reason": None, "stop_sequence": None}
                    usage = event.usage if isinstance(event, Delta) else event.result.usage
                    counted = _usage(replace(usage or Usage(0, 0, 0), generated_tokens=0))
                    yield _event("message_start", message=work.message([], ending, counted))
                    yield _event("ping")
                if isinstance(event, Delta):
                    for told in blocks.of(parser.feed(event.text)):
                        yield told
                else:
                    for told in (*blocks.of(parser.end(was_cut(event.result))), *blocks.closed()):
                        yield told
                    ending = work.ending(event.result, blocks.called)
                    yield _event("message_delta", delta=ending, usage=_usage(event.result.usage))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return named(kind, {"type": kind, **fields})


def _usage(used: Usage) -> dict[str, Any]:
    """Tokens that were computed for the prompt, those that were not again, and the answer's."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.generated_tokens,
    }


def _prompt(plan: ChatPlan) -> Prompt:
    return Prompt(messages=plan.messages, template=plan.template)


def _checked(asked: Asked) -> tuple[dict[str, Any], str]:
    """The body and the model that it names."""
    version = asked.headers.get(VERSION_HEADER)
    if version is not None and not _VERSION.fullmatch(version):
        message = f"{VERSION_HEADER}={shown(version, 80)} is no version; send 2023-06-01, or none."
        raise ServiceError(Kind.INVALID, message, field=VERSION_HEADER)
    return dict(asked.body), text_field(asked.body, "model")
