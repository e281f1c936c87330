# SPDX-License-Identifier: Apache-2.0
"""Reasoning: what a model thinks aloud before it answers, between tags of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.writer import Writer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Tags:
    """What stands around reasoning."""

    open: str
    close: str


# Where a template or the special tokens have the first, the model thinks between them.
KNOWN_TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ReasoningOptions:
    """What a request says of reasoning. `enabled` and `effort` go to the template, where they are given, with further
    `variables`; what they do there is the template's own."""

    enabled: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def template(self) -> dict[str, Any]:
        """Variables of the template."""
        enabled = self.enabled if self.effort != "none" else False
        switches = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
        effort = {} if self.effort in (None, "none") else {"reasoning_effort": self.effort}
        return {**switches, **effort, **self.variables}


@dataclass(frozen=True)
class Thinking:
    """How an answer begins: within reasoning that the prompt has `opened`, or perhaps with the opening tag."""

    tags: Tags
    opened: bool


def openai_reasoning(body: Mapping[str, Any]) -> ReasoningOptions:
    """What `reasoning_effort`, `enable_thinking` and `chat_template_kwargs` of a body say. Raises `RequestError`."""
    effort, enabled = body.get("reasoning_effort"), body.get("enable_thinking")
    variables = body.get("chat_template_kwargs")
    if not isinstance(variables, Mapping | None) or (variables and "chat_template" in variables):
        place = "chat_template_kwargs"
        raise RequestError(f"{place}={shown(variables, 80)} is no object of variables; give one.", place)
    if not isinstance(enabled, bool | None):
        place = "enable_thinking"
        raise RequestError(f"{place}={shown(enabled, 80)} is neither true nor false; give one.", place)
    return ReasoningOptions(enabled, checked_effort(effort, "reasoning_effort"), variables or {})


def checked_effort(effort: Any, place: str) -> str | None:
    """The effort itself. Raises `RequestError` for what is none."""
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise RequestError(f"{place}={shown(effort, 80)} is no effort; use one of {', '.join(EFFORTS)}.", place)
    return effort


def thinking_of(model: ChatModel, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> Thinking | None:
    """How the answer to this chat begins; None for a model that has no tags."""
    for tags in KNOWN_TAGS:
        thinks = tags.close in model.template or tags.open in model.special_tokens
        if thinks or tags.open in model.template:
            opened = _opens(model.render(messages, **template), tags, messages, template)
            if thinks or opened:
                return Thinking(tags, opened)
    return None


def num_thought(thinking: Thinking, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> int:
    """How many tokens of an answer that thinks are its thoughts, closing tag included: all where it is not closed."""
    close, seen = thinking.tags.close.encode(), b""
    for count, token in enumerate(token_ids, start=1):
        seen = seen[-len(close) :] + token_bytes(token)
        if close in seen:
            return count
    return len(token_ids)


def read_reasoning(reader: Reader, writer: Writer, thinking: Thinking) -> Program:
    """Nothing; the reasoning at the beginning, if there is any, is read and written. Blanks at tags are dropped."""
    if not thinking.opened:
        blanks = yield from reader.blanks()
        came = yield from reader.word(thinking.tags.open)
        if came != thinking.tags.open:
            if not came or not reader.is_begun(came, thinking.tags.open):
                reader.unread(blanks + came)
            return
    yield from reader.blanks()
    yield from reader.until(Marks((thinking.tags.close,)), writer.reasoning)
    yield from reader.blanks()


def _opens(prompt: str, tags: Tags, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> bool:
    if template.get("continue_final_message"):
        # What is gone on with may be amid its reasoning.
        _, tag, behind = str(messages[-1]["content"]).rpartition(tags.open)
        return bool(tag) and tags.close not in behind
    _, tag, behind = prompt.rpartition(tags.open)
    return bool(tag) and not behind.strip()
