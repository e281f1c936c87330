# SPDX-License-Identifier: Apache-2.0
"""`plan`: what the service is asked for a chat with tools and reasoning, and how its answers are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.grammar_spec import MAX_TEXT
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.registry import dialect_named, dialect_of
from serving.chat.holding import holdable
from serving.chat.messages import told
from serving.chat.model import ChatModel
from serving.chat.parser import AnswerParser
from serving.chat.reasoning import ReasoningOptions, Thinking, thinking_of
from serving.chat.structure import Wanted, grammar_of
from serving.chat.tools import ChatTools

_NO_STRUCTURE = {"json_schema": None, "regex": None, "choice": None}


@dataclass(frozen=True)
class Chat:
    """What was asked: checked messages (`serving.chat.messages`), tools and what is said of reasoning."""

    messages: Messages
    tools: ChatTools = field(default_factory=ChatTools)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)


@dataclass(frozen=True)
class ChatPlan:
    """What to ask the service: `messages` and the variables of `template`, and `params`. Each answer is read by a
    `parser()` of its own. `constrained` says that `params.grammar` is ours, `plain` that an answer is all
    content, and `thinking` how it may begin otherwise."""

    messages: tuple[Mapping[str, Any], ...]
    template: Mapping[str, Any]
    params: SamplingParams
    parser: Callable[[], AnswerParser]
    constrained: bool = False
    plain: bool = False
    thinking: Thinking | None = None


def plan(chat: Chat, model: ChatModel, params: SamplingParams, dialect: str = "") -> ChatPlan:
    """The plan for a chat; `dialect` names how the model writes calls (else its template tells). Raises `RequestError`.

    With a choice of "required", or a tool by name, the answer is nothing but calls, in the dialect's own format and
    with arguments that the schemas hold for; with "auto" it is text, or text and then such calls. Tools that are not
    `strict` pass over what cannot be enforced (`serving.chat.holding`). Of tools whose schemas are too long for a
    grammar the calls of "auto" are left free. A structure of the caller's own holds for the content. With neither tools
    nor reasoning the params stay as they are.
    """
    spoken = dialect_named(dialect) if dialect else dialect_of(model.template)
    chat = replace(chat, tools=holdable(chat.tools, spoken, model))
    messages = told(chat.messages, chat.tools, model, spoken)
    template = dict(chat.reasoning.template)
    if chat.tools.tools and chat.tools.choice.mode != "none" and model.takes_tools:
        template["tools"] = [tool.shown for tool in chat.tools.tools]
    thinking = thinking_of(model, messages, template)
    called = chat.tools.callable
    grammar = _grammar(chat.tools, thinking, spoken, model, params)
    if grammar is not None:
        params = replace(params, **_NO_STRUCTURE, grammar=grammar)
    words = (spoken.words if called else ()) + ((thinking.tags.open, thinking.tags.close) if thinking else ())
    dropped: tuple[str, ...] = ()
    if params.skip_special_tokens and any(word in model.special_tokens for word in words):
        # The parser has to see some, and so leaves out the others itself.
        params = replace(params, skip_special_tokens=False)
        dropped = tuple(word for word in model.special_tokens if word not in words)
    return ChatPlan(
        messages=tuple(messages),
        template=template,
        params=params,
        parser=_parser(spoken if called else None, chat.tools, thinking, dropped),
        constrained=grammar is not None,
        plain=not called and thinking is None,
        thinking=thinking,
    )


def _parser(
    dialect: AbstractDialect | None, tools: ChatTools, thinking: Thinking | None, dropped: tuple[str, ...]
) -> Callable[[], AnswerParser]:
    by_name = {tool.name: tool for tool in tools.callable}
    return lambda: AnswerParser(
        dialect, by_name, thinking, dropped, only_calls=dialect is not None and tools.choice.mode == "required"
    )


def _grammar(
    tools: ChatTools, thinking: Thinking | None, dialect: AbstractDialect, model: ChatModel, params: SamplingParams
) -> str | None:
    called = tools.callable
    required = tools.choice.mode == "required"
    wanted = Wanted(
        calls=dialect.form(called, model) if called else None,
        required=required,
        one_call=tools.one_call,
        thinking=thinking,
    )
    grammar = grammar_of(wanted, params, model.special_tokens)
    if grammar is None or len(grammar) <= MAX_TEXT:
        return grammar
    if required or params.structured:
        raise RequestError(
            f"tools need a grammar of {len(grammar)} characters, over the limit of {MAX_TEXT}; shorten their schemas, "
            "or allow fewer.",
            "tools",
        )
    return None
