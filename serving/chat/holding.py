# SPDX-License-Identifier: Apache-2.0
"""`holdable`: tools whose schemas an answer can be held to.

Schemas are written for whoever checks arguments behind the call, and have keywords that no grammar can hold: patterns
that look around, references to other documents, types of other languages. What is too much of a tool that is not strict
goes: the keyword, or the property's schema, or all of it but that arguments are an object. A strict tool is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.grammar import LIMITS
from metrale_jax.text.grammar_spec import MAX_TEXT, GrammarSpec, library_grammar
from metrale_jax.text.trial import Named, refusals
from serving.chat.dialects.api import AbstractDialect
from serving.chat.model import ChatModel
from serving.chat.structure import Wanted, grammar_of
from serving.chat.tools import ChatTools, Tool

# A schema of nothing but these is held to, whatever the dialect.
_PLAIN = frozenset("type properties required items enum description title default additionalProperties".split())
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_DEFINED = ("$defs", "definitions")
_MAPS, _LISTS = ("properties", *_DEFINED), ("anyOf", "oneOf", "allOf")
# What says nothing of values, or is looked into.
_PASSED = frozenset((*_MAPS, *_LISTS, "items", "required", "description", "title", "default", "examples", "$comment"))
# Beyond these, a search is not worth its time.
_MAX_PLAIN, _MAX_KEYWORDS = 1 << 14, 400
_REASON = re.compile(
    r"(?:failed to compile JSON schema:)?\s*(.*?)\s*(?:\n\s+\d+ \||<state>|<non-verbose/>|$)", re.DOTALL
)
_ANY_OBJECT = '{"type": "object"}'

Steps = tuple[str | int, ...]


def holdable(tools: ChatTools, dialect: AbstractDialect, model: ChatModel) -> ChatTools:
    """The same tools, their `enforced` schemas such as calls in this dialect can be held to.

    Raises `RequestError` for a strict one that has others; it says where and what."""
    called = tools.callable
    if sum(len(tool.parameters) for tool in called) < _MAX_PLAIN and all(_is_plain(tool.held) for tool in called):
        return tools
    trial = _Trial(dialect, model)
    if not trial.refusal(called):
        return tools
    made = {tool.name: _mended(tool, trial) for tool in called}
    if trial.refusal(tuple(made.values())):
        # Each can be held to, but not all of them.
        made = {name: tool if tool.strict else replace(tool, enforced=_ANY_OBJECT) for name, tool in made.items()}
    return replace(tools, tools=tuple(made.get(tool.name, tool) for tool in tools.tools))


def reason_of(error: str) -> str:
    """What the library says of a schema, without what it was made into."""
    where = error.partition("failed to compile JSON schema:")
    said = _REASON.match(where[2] or where[0])
    text = " ".join((said[1] if said else error).split())
    return text.rpartition("error: ")[2][:200]


@dataclass(frozen=True)
class _Trial:
    """Tries calls of tools in the dialect of a model."""

    dialect: AbstractDialect
    model: ChatModel

    def refusal(self, tools: Sequence[Tool]) -> str:
        """Why calls of these tools cannot be held to their schemas; "" if they can. Those that are left free can."""
        return self.refusals([tools])[0]

    def refusals(self, several: Sequence[Sequence[Tool]]) -> list[str]:
        """The same for several sets of tools."""
        found: list[str] = []
        texts: list[str] = []
        for tools in several:
            try:
                wanted = Wanted(self.dialect.form(tools, self.model), required=True)
                grammar = grammar_of(wanted, SamplingParams(), self.model.special_tokens) or ""
                texts.append("" if len(grammar) > MAX_TEXT else library_grammar(GrammarSpec("grammar", grammar)))
                found.append("")
            except RecursionError:
                texts.append("")
                found.append("it is too deeply nested")
            except RequestError as error:
                texts.append("")
                found.append(str(error).rstrip("."))
        special = tuple(sorted(self.model.special_tokens.items()))
        told = iter(_told(tuple(filter(None, texts)), special))
        return [next(told) if text else reason for text, reason in zip(texts, found, strict=True)]


@lru_cache(maxsize=64)
def _told(texts: tuple[str, ...], special: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Chats come again and again with the same tools."""
    vocab_size = max((token for _, token in special), default=-1) + 1
    return tuple(refusals(texts, LIMITS, Named(vocab_size, dict(special)))) if texts else ()


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or not schema.keys() <= _PLAIN or schema.get("type", "object") not in _TYPES:
        return False
    if "enum" in schema and not (schema.get("type", "string") == "string" and all(map(_is_text, schema["enum"]))):
        return False
    properties = schema.get("properties", {})
    inner = [*properties.values(), *([schema["items"]] if "items" in schema else ())]
    return (
        isinstance(schema.get("additionalProperties", False), bool)
        and set(schema.get("required", ())) <= properties.keys()
        and all(map(_is_plain, inner))
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _mended(tool: Tool, trial: _Trial) -> Tool:
    """The tool, held to what it can be."""
    refusal = trial.refusal([tool])
    if not refusal:
        return tool
    schema = tool.held
    # What is referred to comes first: else it would be the references that are refused.
    for defined in (True, False):
        keywords = [one for one in _keywords(schema) if _is_defined(one[0]) is defined]
        if len(keywords) > _MAX_KEYWORDS:
            break
        tests = [[replace(tool, enforced=json.dumps(_alone(schema, *one)))] for one in keywords]
        for (steps, name), reason in zip(keywords, trial.refusals(tests), strict=True):
            if reason and tool.strict:
                raise _refused(tool, schema, steps, name, reason)
            if reason:
                del _at(schema, steps)[name]
    if tool.strict:
        raise _refused(tool, schema, (), "", refusal)
    return _without_properties(replace(tool, enforced=json.dumps(schema, ensure_ascii=False)), trial)


def _without_properties(tool: Tool, trial: _Trial) -> Tool:
    """The tool without the schemas of properties that cannot be held to, and if that is not enough, without any."""
    if not trial.refusal([tool]):
        return tool
    schema = tool.held
    names = list(schema.get("properties", {}))[:_MAX_KEYWORDS]
    tests = [[replace(tool, enforced=json.dumps(_alone(schema, ("properties",), name)))] for name in names]
    for name, reason in zip(names, trial.refusals(tests), strict=True):
        if reason:
            schema["properties"][name] = {}
    open_tool = replace(tool, enforced=json.dumps(schema, ensure_ascii=False))
    return replace(tool, enforced=_ANY_OBJECT) if trial.refusal([open_tool]) else open_tool


def _keywords(schema: Mapping[str, Any]) -> Iterator[tuple[Steps, str]]:
    """Where each keyword stands that says something of values."""
    left: list[tuple[Steps, Any]] = [((), schema)]
    while left:
        steps, found = left.pop()
        if not isinstance(found, Mapping):
            continue
        yield from ((steps, name) for name in found if name not in _PASSED)
        left += [((*steps, name, key), one) for name in _MAPS for key, one in found.get(name, {}).items()]
        left += [((*steps, name, at), one) for name in _LISTS for at, one in enumerate(found.get(name, ()))]
        left.append(((*steps, "items"), found.get("items")))


def _is_defined(steps: Steps) -> bool:
    return bool(steps) and steps[0] in _DEFINED


def _alone(schema: Mapping[str, Any], steps: Steps, name: str) -> dict[str, Any]:
    """A schema with nothing but that keyword, or property, and what it may refer to."""
    defined = {key: schema[key] for key in _DEFINED if key in schema}
    found = _at(schema, steps)
    if steps == ("properties",):
        return {"type": "object", "properties": {name: found[name]}, **defined}
    if not steps:
        return {"type": "object", **defined, name: found[name]}
    beside = {"type": found["type"]} if found.get("type") in _TYPES else {}
    test = {**beside, name: found[name]}
    if _is_defined(steps):
        return {"type": "object", "properties": {"a": test}}
    return {"type": "object", "properties": {"a": test}, **defined}


def _at(schema: Any, steps: Steps) -> Any:
    for step in steps:
        schema = schema[step]
    return schema


def _refused(tool: Tool, schema: Mapping[str, Any], steps: Steps, name: str, reason: str) -> RequestError:
    path = tool.place
    for step in (*steps, *([name] if name else ())):
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    reason = reason_of(reason)
    if not name:
        message = f"{path} of the tool {tool.name!r} cannot be enforced ({reason}); simplify it, or leave strict out."
        return RequestError(message, path)
    given = shown(_at(schema, steps)[name], 80)
    message = f"{path}={given} of the tool {tool.name!r} cannot be enforced ({reason}); leave it out, or strict."
    return RequestError(message, path)
