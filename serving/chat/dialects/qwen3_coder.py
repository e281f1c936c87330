# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Coder: `<function=name>` with a `<parameter=key>` for each argument, in `<tool_call>`."""

import json
import string
from collections.abc import Generator, Mapping, Sequence
from typing import Any, final

from metrale_jax.core.errors import RequestError
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import long_id, tool_lines
from serving.chat.json_reader import read_value
from serving.chat.lark import either, json_of, literal, pattern, word
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MARKS, _ENDS = Marks((OPEN, FUNCTION)), Marks((END_PARAMETER,))
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


@final
class Qwen3Coder(AbstractDialect):
    """Texts stand as they are, other values as JSON. Arguments are turned into JSON as they come."""

    def recognizes(self, template: str) -> bool:
        return FUNCTION in template

    @property
    def words(self) -> tuple[str, ...]:
        return (OPEN, CLOSE)

    def program(self, reader: Reader, writer: Writer) -> Program:
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            seen = "" if mark == FUNCTION else (yield from reader.word(FUNCTION))
            called, read = False, ""
            if FUNCTION in (mark, seen):
                called, read = yield from _read_function(reader, writer)
            if not called:
                writer.no_call(before + mark + blanks + seen + read, reader)
                continue
            yield from reader.blanks()
            came = yield from reader.word(CLOSE)
            if came == CLOSE:
                yield from reader.blanks()
            elif not reader.broke_off:
                reader.unread(came)

    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        opening, closing = (word(text, model.special_tokens) for text in (OPEN, CLOSE))
        rules: list[str] = []
        calls = []
        for index, tool in enumerate(tools):
            begin = literal(f"\n{FUNCTION}{tool.name}>\n")
            calls.append(f"{begin} {_parameters(f'p{index}', tool, rules)} {literal(END_FUNCTION + chr(10))} {closing}")
        return CallForm(OPEN, "call", f"{literal(chr(10))} {opening} call", "", (f"call: {either(calls)}", *rules))

    def new_id(self) -> str:
        return long_id()

    def fitted(self, messages: Messages) -> Messages:
        return messages

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            f"You can call functions. Their signatures, one a line:\n{tool_lines(tools)}\n"
            "To call one, answer like this, once for each call:\n"
            f"{OPEN}\n{FUNCTION}name>\n{PARAMETER}key>\nvalue\n{END_PARAMETER}\n{END_FUNCTION}\n{CLOSE}"
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(_spelt(call["function"]) for call in calls)

    def spelt_result(self, name: str, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"


def _read_function(reader: Reader, writer: Writer) -> Generator[None, None, tuple[bool, str]]:
    """Whether a call came, behind `<function=`, and if none did, what was read."""
    name = yield from reader.name(_NAME)
    if name not in writer.tools or (yield from reader.peek()) != ">":
        return False, name
    reader.step()
    properties = writer.tools[name].schema.get("properties", {})
    writer.begin(name)
    opening = "{"
    while True:
        blanks = yield from reader.blanks()
        came = yield from reader.word(PARAMETER)
        if came != PARAMETER:
            # Both tags begin alike, and what is cut off is one of them.
            if not reader.broke_off:
                reader.unread(blanks + came)
            break
        key = yield from reader.run_until(">\n")
        if (yield from reader.peek()) != ">":
            if not reader.broke_off:
                reader.unread(blanks + came + key)
            break
        reader.step()
        writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _read_parameter(reader, writer, _is_text(properties.get(key)))
    yield from reader.blanks()
    came = yield from reader.word(END_FUNCTION)
    if came == END_FUNCTION:
        writer.arguments("{}" if opening == "{" else "}")
    elif not reader.broke_off:
        reader.unread(came)
    writer.finish()
    return True, ""


def _read_parameter(reader: Reader, writer: Writer, is_text: bool) -> Generator[None, None, None]:
    """A value and its closing tag. A text is without the line breaks that stand around it."""
    yield from reader.word("\n")
    if is_text:
        writer.arguments('"')
        blanks, mark = yield from reader.until(_ENDS, lambda text: writer.arguments(_within(text)))
        if mark:
            writer.arguments(_within(blanks.removesuffix("\n")) + '"')
        return
    yield from reader.blanks()
    yield from read_value(reader, writer.arguments)
    yield from reader.until(_ENDS, writer.arguments)


def _within(text: str) -> str:
    """The text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_text(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or schema.get("type", "string") == "string"


def _parameters(prefix: str, tool: Tool, rules: list[str]) -> str:
    """Lark for the parameters of a tool in their order; rules that it needs are added to `rules`."""
    schema = tool.held
    required = schema.get("required", ())
    found = []
    for index, (key, one) in enumerate(schema.get("properties", {}).items()):
        value = _value(one, schema, tool, key)
        lazy = value.startswith("/")
        opening = literal(f"{PARAMETER}{key}>{chr(10)}")
        rules.append(f"{prefix}_{index}: {opening} {prefix}_{index}_value {literal(chr(10))}")
        # Lazy, so that a text ends with the first closing tag.
        rules.append(f"{prefix}_{index}_value{'[lazy]' if lazy else ''}: {value}")
        found.append(f"{prefix}_{index}{'' if key in required else '?'}")
    return " ".join(found)


def _value(schema: Any, root: Mapping[str, Any], tool: Tool, name: str) -> str:
    """Lark for a value and its closing tag."""
    closing = literal(chr(10) + END_PARAMETER)
    if not _is_text(schema):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{json_of({**shared, **schema}, tool.strict)} {closing}"
    schema = schema if isinstance(schema, Mapping) else {}
    if refused := tool.strict and sorted(set(schema) & {"pattern", "format"}):
        raise RequestError(
            f"parameter {name} of {tool.name} has {', '.join(refused)}, which cannot be enforced in this model's "
            "calls; leave it out, or strict.",
            "tools",
        )
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        spelt = (one if isinstance(one, str) else json.dumps(one) for one in choices)
        return f"({' | '.join(map(literal, spelt))}) {closing}"
    length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return f"/(?s:.{length})\\n{pattern(END_PARAMETER)}/"


def _spelt(function: Mapping[str, Any]) -> str:
    values = ""
    for key, value in function["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        values += f"{PARAMETER}{key}>\n{text}\n{END_PARAMETER}\n"
    return f"{OPEN}\n{FUNCTION}{function['name']}>\n{values}{END_FUNCTION}\n{CLOSE}"
