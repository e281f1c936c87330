# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat, checked: OpenAI's, with calls and their results, and how a model without tools is told them.

A checked message has a role and a text as content; an assistant's may have `reasoning_content`, and `tool_calls` whose
arguments are dicts, as templates want them, or the text of a call that broke off; a tool's has its `tool_call_id` and,
where a call has that id, its `name`.
"""

import json
from collections.abc import Mapping
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.model import ChatModel
from serving.chat.tools import ChatTools

_ROLES = ("system", "user", "assistant", "tool")
# OpenAI's newer name for a system message, and its older one for a tool's.
_ROLE_NAMES = {"developer": "system", "function": "tool"}
ROLES = (*_ROLES, *_ROLE_NAMES)
_IGNORED = frozenset(("refusal", "annotations", "audio"))
_REASONING = ("reasoning_content", "reasoning")
_FIELDS = frozenset(("role", "content", "name", "tool_calls", "function_call", "tool_call_id", *_REASONING))


def openai_messages(given: Any) -> Messages:
    """The messages of a body of /v1/chat/completions. Raises `RequestError` whose field leads to the fault."""
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, "is no list of at least one message; give one")
    messages: Messages = []
    names: dict[str, str] = {}
    for index, one in enumerate(given):
        message = _message(one, f"messages[{index}]")
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            message.setdefault("name", names.get(message["tool_call_id"], ""))
        messages.append(message)
    return messages


def text_of(content: Any, place: str, refusals: bool = False) -> str:
    """The text of a content that is one, or parts of type text; with `refusals` parts of that type are texts too.

    Raises `RequestError` for others by their type."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, content, "is no text; give a text, or parts of type text")
    return "".join(_part_text(part, f"{place}[{index}]", refusals) for index, part in enumerate(content))


def arguments_of(given: Any, place: str) -> dict[str, Any] | str:
    """The arguments of an earlier call as a dict: they are one already, or its JSON text.

    A text that is none, as an answer has it that was cut off or went wrong, stays itself."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, Mapping):
            return given
    if not isinstance(value, Mapping):
        raise _wrong(place, given, "is no JSON object; give the arguments as the answer had them")
    return dict(value)


def call_message(call_id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """A call as it stands in a checked message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def told(messages: Messages, tools: ChatTools, model: ChatModel, dialect: AbstractDialect) -> Messages:
    """The messages as the model's template takes them: what it has no place for is written into the texts."""
    messages = _with_broken_calls_told(messages)
    messages = dialect.fitted(messages) if model.takes_calls else _spelt(messages, dialect)
    if tools.tools and tools.choice.mode != "none" and not model.takes_tools:
        messages = _instructed(messages, dialect.described(tools.tools), model)
    return messages


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(place, given, "is no object; give one with role and content")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{place}.role", role, f"is not one of {', '.join(ROLES)}; use one of these")
    role = _ROLE_NAMES.get(role, role)
    for name, value in given.items():
        if name not in _FIELDS and name not in _IGNORED and value is not None:
            raise RequestError(f"{place}.{name} is not served here; leave it out.", f"{place}.{name}")
    message: dict[str, Any] = {"role": role, "content": ""}
    calls = _calls(given, place) if role == "assistant" else []
    content = given.get("content")
    if role == "assistant" and content is None:
        # It called, thought, or refused.
        message["content"] = given["refusal"] if isinstance(given.get("refusal"), str) else ""
    else:
        message["content"] = text_of(content, f"{place}.content", refusals=role == "assistant")
    if isinstance(given.get("name"), str):
        message["name"] = given["name"]
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = _call_id(given, place)
    reasoning = next((given[name] for name in _REASONING if given.get(name) is not None), None)
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = text_of(reasoning, f"{place}.reasoning_content")
    return message


def _part_text(part: Any, place: str, refusals: bool) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(place, part, "is no object; give parts of type text")
    kind = part.get("type")
    refuses = refusals and kind == "refusal"
    if not refuses and isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
        raise RequestError(f"{place} is of type {shown(kind, 80)}, which is not served; give text.", place)
    text = part.get("refusal" if refuses else "text")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise _wrong(place, part, "is no text; give a text, or parts of type text")
    return text


def _call_id(given: Mapping[str, Any], place: str) -> str:
    if given["role"] == "function":
        return f"call_{given.get('name')}"
    found = given.get("tool_call_id")
    if not isinstance(found, str) or not found:
        raise _wrong(f"{place}.tool_call_id", found, "is no id; give that of the call which this answers")
    return found


def _calls(given: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    legacy = given.get("function_call")
    if legacy is not None:
        return [
            _call(f"call_{legacy.get('name') if isinstance(legacy, Mapping) else ''}", legacy, f"{place}.function_call")
        ]
    listed = given.get("tool_calls")
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise _wrong(f"{place}.tool_calls", listed, "is no list; give one of calls")
    calls = []
    for index, one in enumerate(listed):
        where = f"{place}.tool_calls[{index}]"
        call_id = one.get("id") if isinstance(one, Mapping) else None
        if not isinstance(call_id, str) or not call_id or one.get("type", "function") != "function":
            raise _wrong(where, one, "is no call with an id and a function; give it as the answer had it")
        calls.append(_call(call_id, one.get("function"), f"{where}.function"))
    return calls


def _call(call_id: str, given: Any, place: str) -> dict[str, Any]:
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not name:
        raise _wrong(place, given, "has no name; give it as the answer had it")
    return call_message(call_id, name, arguments_of(given.get("arguments"), f"{place}.arguments"))


def _with_broken_calls_told(messages: Messages) -> Messages:
    """The messages with dicts as arguments of all calls: no template has a place for a text that is no object.

    A call that broke off is text of its message, unless its result follows: then its text is its one argument."""
    answered = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
    made: Messages = []
    for message in messages:
        texts, calls = [message["content"]], []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                calls.append(call)
            elif call["id"] in answered:
                calls.append(call_message(call["id"], function["name"], {"arguments": function["arguments"]}))
            else:
                texts.append(f"{function['name']}({function['arguments']}")
        if calls == message.get("tool_calls", []):
            made.append(message)
            continue
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        told_calls = {"tool_calls": calls} if calls else {}
        made.append({**others, "content": "\n".join(filter(None, texts)), **told_calls})
    return made


def _spelt(messages: Messages, dialect: AbstractDialect) -> Messages:
    """Calls within the assistant's texts, and results that follow each other as one message of the user."""
    spelt: Messages = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(dialect.spelt_result(message.get("name", ""), message["content"]))
            continue
        if results:
            spelt.append({"role": "user", "content": "\n".join(results)})
            results = []
        calls = message.get("tool_calls")
        if calls:
            texts = (message["content"], dialect.spelt_calls(calls))
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**others, "content": "\n".join(filter(None, texts))}
        spelt.append(message)
    return [*spelt, {"role": "user", "content": "\n".join(results)}] if results else spelt


def _instructed(messages: Messages, instructions: str, model: ChatModel) -> Messages:
    """The messages with instructions in the system message, or in the first where a template knows none."""
    first, *others = messages
    if first["role"] == "system" or not model.takes_system:
        return [{**first, "content": f"{first['content']}\n\n{instructions}".strip()}, *others]
    return [{"role": "system", "content": instructions}, *messages]


def _wrong(place: str, given: Any, what: str) -> RequestError:
    return RequestError(f"{place}={shown(given, 80)} {what}.", place)
