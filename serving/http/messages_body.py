# SPDX-License-Identifier: Apache-2.0
"""Bodies of Anthropic's /v1/messages as chats and params. Raises `RequestError` whose field leads to the fault."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import SamplingParams
from serving.chat.dialects.api import Messages
from serving.chat.messages import arguments_of, call_message
from serving.chat.plan import Chat
from serving.chat.reasoning import ReasoningOptions, checked_effort
from serving.chat.tools import ChatTools, Choice, Tool, listed, named
from serving.passed_over import DRAWING, MESSAGES_HINTS, MESSAGES_REFUSED, as_meant

CHAT_FIELDS = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format")
SAMPLING = {"max_tokens": "max_tokens", "stop_sequences": "stop"} | {name: name for name in DRAWING if name != "stop"}
KNOWN = (*CHAT_FIELDS, *SAMPLING, *MESSAGES_HINTS, *MESSAGES_REFUSED)
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def chat_of(body: Mapping[str, Any]) -> Chat:
    """The chat that a body asks to go on with."""
    messages = [*_system(body.get("system")), *_messages(body.get("messages"))]
    enabled = _thinking(body)
    effort = checked_effort(_output(body).get("effort"), "output_config.effort")
    # An answer goes on with what the assistant began to say.
    variables = {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}
    return Chat(messages, _tools(body), ReasoningOptions(enabled, effort, variables))


def params_of(body: Mapping[str, Any]) -> SamplingParams:
    """How to draw the answer; one without `max_tokens` is refused."""
    if body.get("max_tokens") is None:
        raise RequestError("max_tokens is not there; say how many tokens the answer may have.", "max_tokens")
    stops = body.get("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise _wrong("stop_sequences", stops, "is no list; give one of texts")
    given = {ours: body[theirs] for theirs, ours in SAMPLING.items() if body.get(theirs) is not None}
    # The second is what the first was called before.
    place, form = "output_config.format", _output(body).get("format")
    if form is None:
        place, form = "output_format", body.get("output_format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping):
            raise _wrong(place, form, "is no json_schema with a schema; give one")
        given["json_schema"] = schema
    return SamplingParams(**as_meant(given))


def names_of(body: Mapping[str, Any]) -> dict[str, str]:
    """What a body calls fields of `SamplingParams`."""
    form = "output_format" if body.get("output_config") is None else "output_config.format"
    return {ours: theirs for theirs, ours in SAMPLING.items()} | {"json_schema": f"{form}.schema"}


def _output(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given = body.get("output_config")
    if not isinstance(given, Mapping | None):
        raise _wrong("output_config", given, "is no object; give one")
    return given or {}


def _thinking(body: Mapping[str, Any]) -> bool | None:
    given = body.get("thinking")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in THINKING:
        raise _wrong("thinking.type", kind, f"is not one of {', '.join(THINKING)}; use one of these")
    budget, most = given.get("budget_tokens"), body.get("max_tokens")
    if kind == "enabled" and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise _wrong("thinking.budget_tokens", budget, "is no count of tokens; give one below max_tokens")
    if kind == "enabled" and isinstance(most, int) and budget >= most:
        raise _wrong("thinking.budget_tokens", budget, f"is not below max_tokens={most}; give fewer")
    return THINKING[kind]


def _tools(body: Mapping[str, Any]) -> ChatTools:
    tools = []
    for index, one in enumerate(listed(body, "tools")):
        place = f"tools[{index}]"
        kind = one.get("type") if isinstance(one, Mapping) else None
        if kind not in (None, "custom"):
            raise _wrong(f"{place}.type", kind, "is not served here; give tools of your own, of type custom")
        tools.append(Tool.of(one, place, "input_schema"))
    given = body.get("tool_choice")
    if given is None:
        return ChatTools(tuple(tools))
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in CHOICES:
        raise _wrong("tool_choice.type", kind, f"is not one of {', '.join(CHOICES)}; use one of these")
    single = kind == "tool"
    names = (named(given, "tool_choice"),) if single else ()
    parallel = given.get("disable_parallel_tool_use")
    if not isinstance(parallel, bool | None):
        raise _wrong("tool_choice.disable_parallel_tool_use", parallel, "is neither true nor false; give one")
    return ChatTools(tuple(tools), Choice(CHOICES[kind], names, single), parallel is not True)


def _system(given: Any) -> Messages:
    return [] if given is None else [{"role": "system", "content": _text(given, "system")}]


def _messages(given: Any) -> Messages:
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, "is no list of at least one message; give one")
    messages: Messages = []
    names: dict[str, str] = {}
    for index, one in enumerate(given):
        for message in _told(one, f"messages[{index}]", names):
            _append(messages, message)
    if messages[-1].get("tool_calls"):
        raise RequestError("messages ends with calls of tools; give their results in a message of user.", "messages")
    return messages


def _append(messages: Messages, message: dict[str, Any]) -> None:
    """Messages of one role that follow each other are one turn."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    messages[-1] = {**last, **message, "content": "\n".join(filter(None, (last["content"], message["content"])))}
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        messages[-1]["tool_calls"] = calls


def _told(given: Any, place: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The messages that one of Anthropic's is: results of tools stand before what the user says."""
    if not isinstance(given, Mapping):
        raise _wrong(place, given, "is no object; give one with role and content")
    role = given.get("role")
    if role not in ("user", "assistant", "system"):
        raise _wrong(f"{place}.role", role, "is not one of user, assistant, system; use one of these")
    content = given.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise _wrong(f"{place}.content", content, "is no text; give a text, or a list of blocks")
    said = _Turn(role, [], [], [], [])
    for index, block in enumerate(content):
        _take(said, block, f"{place}.content[{index}]", names)
    yield from said.results
    if said.texts or said.calls or not said.results:
        message: dict[str, Any] = {"role": role, "content": "\n".join(said.texts)}
        if said.calls:
            message["tool_calls"] = said.calls
        if said.thoughts:
            message["reasoning_content"] = "\n".join(said.thoughts)
        yield message


@dataclass(frozen=True)
class _Turn:
    """What the blocks of a message say."""

    role: str
    texts: list[str]
    thoughts: list[str]
    calls: list[dict[str, Any]]
    results: list[dict[str, Any]]


def _take(said: _Turn, block: Any, place: str, names: dict[str, str]) -> None:
    if not isinstance(block, Mapping):
        raise _wrong(place, block, "is no object; give a block with its type")
    kind = block.get("type")
    if kind == "text":
        said.texts.append(_field(block, "text", place))
    elif kind == "thinking" and said.role == "assistant":
        said.thoughts.append(_field(block, "thinking", place))
    elif kind == "redacted_thinking" and said.role == "assistant":
        pass  # whoever wrote it could read it
    elif kind == "tool_use" and said.role == "assistant":
        call_id, name = _field(block, "id", place), _field(block, "name", place)
        names[call_id] = name
        said.calls.append(call_message(call_id, name, arguments_of(block.get("input"), f"{place}.input")))
    elif kind == "tool_result" and said.role == "user":
        call_id = _field(block, "tool_use_id", place)
        content = block.get("content")
        text = "" if content is None else _text(content, f"{place}.content")
        if block.get("is_error"):
            text = f"Error: {text}"
        said.results.append({"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, ""), "content": text})
    else:
        raise _wrong(f"{place}.type", kind, f"is not served in a message of {said.role}; give text, or calls of tools")


def _field(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", value, "is no text; give one")
    return value


def _text(given: Any, place: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong(place, given, "is no text; give a text, or a list of blocks of type text")
    texts = []
    for index, block in enumerate(given):
        where = f"{place}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise _wrong(f"{where}.type", kind, "is not served; give blocks of type text")
        texts.append(_field(block, "text", where))
    return "\n".join(texts)


def _wrong(place: str, given: Any, what: str) -> RequestError:
    return RequestError(f"{place}={shown(given, 80)} {what}.", place)
