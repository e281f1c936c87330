# SPDX-License-Identifier: Apache-2.0
"""`ChatTools`: what a request says of tools, checked. Errors are `RequestError`s whose field is the body's."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self

from metrale_jax.core.errors import RequestError, shown
from serving.chat.schema_check import check_schema, closed

MAX_TOOLS = 128
# Some APIs take names of 64 characters, some of 128.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# What else says which properties there are.
_OF_PROPERTIES = frozenset(
    "additionalProperties patternProperties unevaluatedProperties $ref allOf anyOf oneOf minProperties if".split()
)
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is JSON text of a schema of type object. `strict` has each
    keyword of it enforced, or refused; else those that cannot be are passed over. What calls are held to is `enforced`,
    or `parameters` where it is empty."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False
    enforced: str = field(default="", compare=False)

    @classmethod
    def of(cls, given: Any, place: str, parameters: str = "parameters") -> Self:
        """The tool that an object with name, description, strict and a schema called `parameters` describes."""
        if not isinstance(given, Mapping):
            raise _wrong(place, given, "is no object; give one with name, description and parameters")
        name, description, strict = given.get("name"), given.get("description"), given.get("strict")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise _wrong(f"{place}.name", name, "is no name; use 1 to 128 letters, digits, '_', '-' and '.'")
        if not isinstance(description, str | None):
            raise _wrong(f"{place}.description", description, "is no text; give one, or leave it out")
        if not isinstance(strict, bool | None):
            raise _wrong(f"{place}.strict", strict, "is neither true nor false; give one")
        text = _schema_text(given.get(parameters), f"{place}.{parameters}")
        schema = json.loads(text)
        # With OpenAI, whose name for it this is, strict arguments are all required.
        held = closed(schema, f"{place}.{parameters}", parameters == "parameters") if strict else _without_any(schema)
        return cls(name, description or "", text, bool(strict), json.dumps(held, ensure_ascii=False))

    @property
    def schema(self) -> dict[str, Any]:
        """`parameters` as data."""
        return json.loads(self.parameters)

    @property
    def held(self) -> dict[str, Any]:
        """The schema that calls are held to."""
        return json.loads(self.enforced or self.parameters)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Choice:
    """Whether tools are called: never ("none"), as the model likes ("auto"), or for sure ("required"). `names` are
    those that may be, all if it is empty; `single` is for a choice that asks for one call of one tool."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    single: bool = False


@dataclass(frozen=True)
class ChatTools:
    """The tools of a request. Without `parallel` an answer has one call at most. `legacy` is for a request that named
    `functions`, whose answer has a `function_call`."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = Choice()
    parallel: bool = True
    legacy: bool = field(default=False, compare=False)

    def __post_init__(self):
        names = [tool.name for tool in self.tools]
        place = "functions" if self.legacy else "tools"
        if len(names) > MAX_TOOLS:
            raise RequestError(f"{place} has {len(names)} tools, over the limit of {MAX_TOOLS}; give fewer.", place)
        for index, name in enumerate(names):
            if name in names[:index]:
                where = f"{place}[{index}]"
                raise RequestError(f"{where} has the name {name!r} of an earlier one; give each its own.", where)
        where = "function_call" if self.legacy else "tool_choice"
        for name in self.choice.names:
            if name not in names:
                raise RequestError(
                    f"{where} names {shown(name, 80)}, which is no tool here; use one of {place}.", where
                )
        if self.choice.mode == "required" and not names:
            raise RequestError(f"{where} asks for a call, but there are no tools; give {place}.", where)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if not self.choice.names or tool.name in self.choice.names)

    @property
    def one_call(self) -> bool:
        """Whether an answer has one call at most."""
        return self.choice.single or self.legacy or not self.parallel


def openai_tools(body: Mapping[str, Any]) -> ChatTools:
    """The tools of a body of /v1/chat/completions."""
    if body.get("functions") is not None or body.get("function_call") is not None:
        return _legacy_tools(body)
    tools = tuple(_openai_tool(one, f"tools[{index}]") for index, one in enumerate(listed(body, "tools")))
    choice = _openai_choice(body.get("tool_choice"))
    return ChatTools(tools, choice, parallel_calls(body))


def listed(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The list of this name in the body; an empty one where there is none."""
    given = body.get(name)
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _wrong(name, given, "is no list; give one of objects")
    return given


def parallel_calls(body: Mapping[str, Any]) -> bool:
    """What the body's `parallel_tool_calls` says."""
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise _wrong("parallel_tool_calls", parallel, "is neither true nor false; give one")
    return parallel is not False


def named(given: Any, place: str) -> str:
    """The name in an object {"name": ...}."""
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(place, given, "has no name; name one of the tools")
    return name


def _openai_tool(given: Any, place: str) -> Tool:
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise _wrong(place, given, 'is no tool of type function; give {"type": "function", "function": ...}')
    return Tool.of(given.get("function"), f"{place}.function")


def _openai_choice(given: Any) -> Choice:
    if given is None or (isinstance(given, str) and given in ("none", "auto", "required")):
        return Choice(given or "auto")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function":
        return Choice("required", (named(given.get("function"), "tool_choice.function"),), single=True)
    if kind == "allowed_tools":
        return _allowed_tools(given.get("allowed_tools"))
    raise _wrong("tool_choice", given, "is not none, auto, required, a function or allowed_tools; give one of these")


def _allowed_tools(given: Any) -> Choice:
    place = "tool_choice.allowed_tools"
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required"):
        raise _wrong(place, given, 'has no mode "auto" or "required"; give one, and a list of tools')
    tools = listed(given, "tools")
    names = tuple(named(one.get("function") if isinstance(one, Mapping) else one, f"{place}.tools") for one in tools)
    if not names:
        raise _wrong(f"{place}.tools", given.get("tools"), "allows no tool; name at least one")
    return Choice(mode, names)


def _legacy_tools(body: Mapping[str, Any]) -> ChatTools:
    for name in ("tools", "tool_choice"):
        if body.get(name) is not None:
            raise RequestError(f"{name} and functions are both given; leave functions and function_call out.", name)
    functions = listed(body, "functions")
    tools = tuple(Tool.of(one, f"functions[{index}]") for index, one in enumerate(functions))
    given = body.get("function_call")
    if given is None or (isinstance(given, str) and given in ("none", "auto")):
        return ChatTools(tools, Choice(given or "auto"), legacy=True)
    return ChatTools(tools, Choice("required", (named(given, "function_call"),), single=True), legacy=True)


def _schema_text(given: Any, place: str) -> str:
    if given is None:
        return json.dumps(dict(NO_PARAMETERS))
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise _wrong(place, given, 'is no JSON schema of type object; give {"type": "object", "properties": ...}')
    check_schema(given, place)
    try:
        # The order of properties is the order in which a call gives them: it stays.
        return json.dumps({"type": "object", **given}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not plain JSON ({error}); give plain values.", place) from error


def _without_any(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that names its properties, and there are none, has none: a model would make some up."""
    is_bare = schema.get("properties") == {} and not schema.get("required") and not schema.keys() & _OF_PROPERTIES
    return {**schema, "additionalProperties": False} if is_bare else schema


def _wrong(place: str, given: Any, what: str) -> RequestError:
    return RequestError(f"{place}={shown(given, 80)} {what}.", place)
