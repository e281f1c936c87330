# SPDX-License-Identifier: Apache-2.0
"""FunctionGemma's values, `{key:value}` with texts between `<escape>`s: read as JSON, and held to a schema."""

import json
import string
from collections.abc import Generator, Mapping
from typing import Any, final

from metrale_jax.core.errors import RequestError
from serving.chat.json_reader import MAX_DEPTH, is_scalar, read
from serving.chat.lark import json_of, literal, word
from serving.chat.reader import Emit, Marks, Reader
from serving.chat.tools import Tool

ESCAPE = "<escape>"
NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_ESCAPES = Marks((ESCAPE,))
_SCALAR = frozenset(string.ascii_letters + string.digits + "+-.")
_CLOSING = {"{": "}", "[": "]"}
# What is held to of a schema; all else is refused if strict, and passed over otherwise.
_HELD = frozenset(
    "type properties required items enum const anyOf oneOf $ref $defs definitions minLength maxLength minItems "
    "maxItems minimum maximum exclusiveMinimum exclusiveMaximum multipleOf additionalProperties description title "
    "default examples $schema $id $comment".split()
)
_NUMERIC_KEYS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def read_object(reader: Reader, emit: Emit) -> Generator[None, None, bool]:
    """Whether a whole object came; what of it was read goes to `emit` as JSON. Its brace comes next.

    Where it is none, the first character that cannot belong to it stays unread.
    """
    inside = ""
    while True:
        character = yield from reader.peek()
        if character and character in "{[":
            if len(inside) == MAX_DEPTH:
                return False
            read(reader, emit, character)
            inside += character
            if (yield from reader.peek()) != _CLOSING[character]:
                if character == "{" and not (yield from _read_key(reader, emit)):
                    return False
                continue
        elif not (yield from _read_scalar(reader, emit, character)):
            return False
        while inside and (character := (yield from reader.peek())) != ",":
            if character != _CLOSING[inside[-1]]:
                return False
            read(reader, emit, character)
            inside = inside[:-1]
        if not inside:
            return True
        read(reader, emit, ",")
        if inside[-1] == "{" and not (yield from _read_key(reader, emit)):
            return False


def _read_key(reader: Reader, emit: Emit) -> Generator[None, None, bool]:
    yield from reader.blanks()
    key = yield from reader.run_until(":{}[],<")
    if (yield from reader.peek()) != ":" or not key:
        return False
    reader.step()
    emit(f"{json.dumps(key, ensure_ascii=False)}:")
    yield from reader.blanks()
    return True


def _read_scalar(reader: Reader, emit: Emit, character: str) -> Generator[None, None, bool]:
    if character == ESCAPE[0]:
        came = yield from reader.word(ESCAPE)
        if came != ESCAPE:
            return False
        emit('"')
        blanks, mark = yield from reader.until(_ESCAPES, lambda text: emit(_within(text)))
        emit(_within(blanks))
        if mark:
            emit('"')
        return bool(mark)
    scalar = yield from reader.name(_SCALAR)
    if not is_scalar(scalar):
        return False
    emit(scalar)
    return True


def _within(text: str) -> str:
    """The text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@final
class ValueRules:
    """Lark rules for the arguments of a tool: `root` is the first, `rules` are all; their names begin with `prefix`."""

    def __init__(self, prefix: str, tool: Tool, special_tokens: Mapping[str, int]):
        self._prefix, self._tool = prefix, tool
        self._escape = word(ESCAPE, special_tokens)
        # Where the sign for an end is no token of its own, texts do without its first letter.
        self._letter = "." if ESCAPE in special_tokens else f"[^{ESCAPE[0]}]"
        self._by_ref: dict[str, str] = {}
        self.rules: list[str] = []
        self.root = self._object(tool.held)

    def _value(self, schema: Any) -> str:
        """A rule's name or an expression for values of this schema."""
        if not isinstance(schema, Mapping):
            return self._any()
        if refused := self._tool.strict and sorted(set(schema) - _HELD):
            raise RequestError(
                f"the parameters of {self._tool.name} have {', '.join(refused)}, which cannot be enforced in "
                "this model's calls; leave it out, or strict.",
                "tools",
            )
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            return self._rule(
                " | ".join(map(self._exactly, [schema["const"]] if "const" in schema else schema["enum"]))
            )
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._rule(" | ".join(map(self._value, schema[name])))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._rule(" | ".join(self._value({**schema, "type": one}) for one in kind))
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._text(schema)
        if kind in ("integer", "number", "boolean", "null"):
            return self._rule(json_of({key: schema[key] for key in _NUMERIC_KEYS if key in schema}, self._tool.strict))
        return self._any()

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _text(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if most == 0:
            return f"{self._escape} {self._escape}"
        some = f"/(?s:{self._letter}{{{max(least, 1)},{most}}})/"
        return self._rule(f"{self._escape} {some}{'' if least else '?'} {self._escape}")

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return literal("[]")
        item = self._value(schema.get("items"))
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({literal(',')} {item}){more}" if most != 1 else item
        return self._rule(f"{literal('[')} ({items}){'' if least else '?'} {literal(']')}")

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Its properties in their order: `first_i` has none before it, `more_i` some."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        members = [(f"{literal(f'{key}:')} {self._value(one)}", key in required) for key, one in properties.items()]
        first, more = literal("}"), literal("}")
        for member, needed in reversed(members):
            taken = self._rule(f"{member} {more}")
            first = self._rule(taken if needed else f"{taken} | {first}")
            more = self._rule(f"{literal(',')} {taken}" if needed else f"{literal(',')} {taken} | {more}")
        return self._rule(f"{literal('{')} {first}")

    def _referred(self, ref: str) -> str:
        if ref not in self._by_ref:
            found: Any = self._tool.held
            for step in ref.removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            name = self._by_ref[ref] = f"{self._prefix}_ref_{len(self._by_ref)}"
            self.rules.append(f"{name}: {self._value(found)}")
        return self._by_ref[ref]

    def _any(self) -> str:
        name = f"{self._prefix}_any"
        if name not in self._by_ref:
            self._by_ref[name] = name
            texts = f"{self._escape} /(?s:{self._letter}+)/? {self._escape}"
            scalars = json_of({"type": ["number", "boolean", "null"]}, strict=False)
            items = f'"[" ({name} ("," {name})*)? "]"'
            member = f"/[A-Za-z0-9_-]+:/ {name}"
            self.rules += [f"{name}: {texts} | {name}_0 | {items} | {name}_1"]
            self.rules += [f"{name}_0: {scalars}", f'{name}_1: "{{" ({member} ("," {member})*)? "}}"']
        return name

    def _exactly(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._escape} {literal(value)} {self._escape}" if value else f"{self._escape} {self._escape}"
        return literal(json.dumps(value))
