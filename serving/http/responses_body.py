# SPDX-License-Identifier: Apache-2.0
"""Bodies of OpenAI's /v1/responses as chats and params. Raises `RequestError` whose field leads to the fault."""

from collections.abc import Mapping
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from serving.chat.dialects.api import Messages
from serving.chat.messages import arguments_of, call_message, text_of
from serving.chat.plan import ChatPlan
from serving.chat.reasoning import ReasoningOptions, checked_effort
from serving.chat.tools import ChatTools, Choice, Tool, listed, named, parallel_calls
from serving.http.metadata import metadata_of
from serving.passed_over import DRAWING, RESPONSES_HINTS, RESPONSES_REFUSED, as_meant, refuse

CHAT_FIELDS = (
    *("input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "reasoning"),
    *("text", "metadata", "store", "top_logprobs"),
)
SAMPLING = {"max_output_tokens": "max_tokens"} | {name: name for name in DRAWING}
# What params have under another name.
KNOWN = (*CHAT_FIELDS, *SAMPLING, *RESPONSES_HINTS, *RESPONSES_REFUSED)
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
LOGPROBS = "message.output_text.logprobs"
# Most are of tools that the server has none of, so there is nothing to include.
INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def params_of(body: Mapping[str, Any]) -> SamplingParams:
    """How to draw the answer; without a limit it runs to the context's end."""
    given = {ours: body[theirs] for theirs, ours in SAMPLING.items() if body.get(theirs) is not None}
    return SamplingParams(**{"max_tokens": None, **as_meant(given), **_form(body), "logprobs": _logprobs(body)})


def names_of(body: Mapping[str, Any]) -> dict[str, str]:
    """What a body calls fields of `SamplingParams`."""
    # A `prompt` is another thing here, and refused.
    prompt = {"prompt": "input"} if body.get("prompt") is None else {}
    return {ours: theirs for theirs, ours in SAMPLING.items()} | {"json_schema": "text.format.schema"} | prompt


def check_rest(body: Mapping[str, Any]) -> None:
    """Nothing. Raises for what is asked beside the chat and cannot be done."""
    refuse(body, RESPONSES_REFUSED)
    metadata_of(body)
    for name, kind, word in (("include", list, "list"), ("store", bool, "switch")):
        if not isinstance(body.get(name), kind | None):
            raise _wrong(name, body[name], f"is no {word}; give one, or leave it out")
    for index, one in enumerate(body.get("include") or ()):
        if one not in INCLUDES:
            raise _wrong(f"include[{index}]", one, f"is not one of {', '.join(INCLUDES)}; use one of these")


def refuse_logprobs(body: Mapping[str, Any], plan: ChatPlan) -> None:
    """Nothing. Raises where log-probabilities are wanted that cannot be told from those of thoughts and calls."""
    if plan.params.logprobs is not None and not plan.plain:
        name = "top_logprobs" if body.get("top_logprobs") else "include"
        message = f"{name} asks for log-probabilities, which answers with thoughts or calls do not have here; "
        raise RequestError(f"{message}leave it out, ask without tools, or ask /v1/chat/completions.", name)


def reasoning_of(body: Mapping[str, Any]) -> ReasoningOptions:
    """What the body says of reasoning."""
    given = body.get("reasoning")
    if not isinstance(given, Mapping | None):
        raise _wrong("reasoning", given, "is no object; give one")
    return ReasoningOptions(effort=checked_effort((given or {}).get("effort"), "reasoning.effort"))


def tools_of(body: Mapping[str, Any]) -> ChatTools:
    """The tools of the body."""
    tools = []
    for index, one in enumerate(listed(body, "tools")):
        place = f"tools[{index}]"
        kind = one.get("type") if isinstance(one, Mapping) else None
        if kind != "function":
            raise _wrong(f"{place}.type", kind, "is not served here; give tools of your own, of type function")
        tools.append(Tool.of(one, place))
    return ChatTools(tuple(tools), _choice(body.get("tool_choice")), parallel_calls(body))


def instructions_of(body: Mapping[str, Any]) -> Messages:
    """The system message of this turn, if there is one."""
    given = body.get("instructions")
    if not isinstance(given, str | None):
        raise _wrong("instructions", given, "is no text; give one")
    return [{"role": "system", "content": given}] if given else []


def input_of(body: Mapping[str, Any], before: Messages) -> Messages:
    """The messages of the body's input, behind those of the response `before`."""
    given = body.get("input")
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _wrong("input", given, "is no text and no list of items; give one")
    taken = _Items(before)
    for index, item in enumerate(given):
        taken.add(item, f"input[{index}]")
    return taken.messages


class _Items:
    """Items as messages: the texts, calls and thoughts of one turn of the assistant are one."""

    def __init__(self, before: Messages):
        self.messages: Messages = list(before)
        self._names = {call["id"]: call["function"]["name"] for one in before for call in one.get("tool_calls", ())}
        self._is_open = False

    def add(self, item: Any, place: str) -> None:
        """Takes the next item."""
        if not isinstance(item, Mapping):
            raise _wrong(place, item, "is no object; give items of type message, function_call or its output")
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, place)
        elif kind == "reasoning":
            self._assistant(reasoning_content=_thoughts(item, place))
        elif kind == "function_call":
            call_id, name = _field(item, "call_id", place), _field(item, "name", place)
            self._names[call_id] = name
            call = call_message(call_id, name, arguments_of(item.get("arguments"), f"{place}.arguments"))
            self._assistant(tool_calls=[call])
        elif kind == "function_call_output":
            call_id = _field(item, "call_id", place)
            text = text_of(item.get("output"), f"{place}.output")
            name = self._names.get(call_id, "")
            self._append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})
        else:
            raise _wrong(f"{place}.type", kind, "is not served; give messages, function_calls and their outputs")

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise _wrong(f"{place}.role", role, f"is not one of {', '.join(ROLES)}; use one of these")
        text = text_of(item.get("content"), f"{place}.content", refusals=role == "assistant")
        if ROLES[role] == "assistant":
            self._assistant(content=text)
        else:
            self._append({"role": ROLES[role], "content": text})

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._is_open = False

    def _assistant(self, content: str = "", **more: Any) -> None:
        if not self._is_open:
            self._append({"role": "assistant", "content": ""})
            self._is_open = True
        last = self.messages[-1]
        calls = [*last.get("tool_calls", ()), *more.pop("tool_calls", ())]
        last |= {"content": "\n".join(filter(None, (last["content"], content))), **more}
        if calls:
            last["tool_calls"] = calls


def _thoughts(item: Mapping[str, Any], place: str) -> str:
    texts = []
    for name in ("content", "summary"):
        for index, part in enumerate(listed(item, name)):
            texts.append(_field(part if isinstance(part, Mapping) else {}, "text", f"{place}.{name}[{index}]"))
        if texts:
            break
    return "\n".join(texts)


def _choice(given: Any) -> Choice:
    if given is None or (isinstance(given, str) and given in ("none", "auto", "required")):
        return Choice(given or "auto")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function":
        return Choice("required", (named(given, "tool_choice"),), single=True)
    if kind == "allowed_tools" and given.get("mode") in ("auto", "required"):
        names = tuple(named(one, "tool_choice.tools") for one in listed(given, "tools"))
        if names:
            return Choice(given["mode"], names)
    raise _wrong(
        "tool_choice", given, "is not none, auto, required, a function or allowed_tools with tools; give one of these"
    )


def _logprobs(body: Mapping[str, Any]) -> int | None:
    """Of how many tokens at each place they are wanted; None for none at all."""
    top = body.get("top_logprobs")
    if isinstance(top, bool) or not isinstance(top, int | None) or not 0 <= (top or 0) <= MAX_LOGPROBS:
        raise _wrong("top_logprobs", top, f"is not an integer from 0 to {MAX_LOGPROBS}; ask for so many")
    return top or 0 if top or LOGPROBS in (body.get("include") or ()) else None


def _form(body: Mapping[str, Any]) -> dict[str, Any]:
    text = body.get("text")
    if not isinstance(text, Mapping | None):
        raise _wrong("text", text, "is no object; give one")
    form = (text or {}).get("format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and isinstance(form.get("schema"), Mapping):
        return {"json_schema": form["schema"]}
    raise _wrong("text.format", form, "is not text, json_object or json_schema with a schema; give one of these")


def _field(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", value, "is no text; give one")
    return value


def _wrong(place: str, given: Any, what: str) -> RequestError:
    return RequestError(f"{place}={shown(given, 80)} {what}.", place)
