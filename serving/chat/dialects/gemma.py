# SPDX-License-Identifier: Apache-2.0
"""FunctionGemma: `<start_function_call>call:name{key:value}<end_function_call>`, texts between `<escape>`s."""

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, final

from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import long_id, tool_lines
from serving.chat.dialects.gemma_values import ESCAPE, NAME, ValueRules, read_object
from serving.chat.lark import either, literal, word
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

OPEN, CLOSE = "<start_function_call>", "<end_function_call>"
_MARKS = Marks((OPEN,))


@final
class Gemma(AbstractDialect):
    """Arguments are turned into JSON as they come."""

    def recognizes(self, template: str) -> bool:
        return OPEN in template

    @property
    def words(self) -> tuple[str, ...]:
        return (OPEN, CLOSE, ESCAPE)

    def program(self, reader: Reader, writer: Writer) -> Program:
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            called, seen = yield from _read_call(reader, writer)
            if not called:
                writer.no_call(before + mark + blanks + seen, reader)
                continue
            yield from reader.blanks()
            closing = yield from reader.word(CLOSE)
            if closing == CLOSE:
                yield from reader.blanks()
            else:
                writer.no_call(closing, reader)

    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        opening, closing = (word(text, model.special_tokens) for text in (OPEN, CLOSE))
        rules, calls = [], []
        for index, tool in enumerate(tools):
            values = ValueRules(f"v{index}", tool, model.special_tokens)
            calls.append(f"{literal(f'call:{tool.name}')} {values.root} {closing}")
            rules += values.rules
        return CallForm(OPEN, "call", f"{opening} call", "", (f"call: {either(calls)}", *rules))

    def new_id(self) -> str:
        return long_id()

    def fitted(self, messages: Messages) -> Messages:
        return messages

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            f"You can call functions. Their signatures, one a line:\n{tool_lines(tools)}\n"
            f"To call one, answer with {OPEN}call:<function name>{{<key>:<value>,…}}{CLOSE}, texts between {ESCAPE}s."
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        functions = (call["function"] for call in calls)
        return "".join(f"{OPEN}call:{one['name']}{_spelt(one['arguments'])}{CLOSE}" for one in functions)

    def spelt_result(self, name: str, content: str) -> str:
        return f"<start_function_response>response:{name}{_spelt({'value': content})}<end_function_response>"


def _read_call(reader: Reader, writer: Writer) -> Generator[None, None, tuple[bool, str]]:
    """Whether a call came, and if none did, what was read."""
    seen = yield from reader.word("call:")
    if seen != "call:":
        return False, seen
    name = yield from reader.name(NAME)
    if name not in writer.tools or (yield from reader.peek()) != "{":
        return False, seen + name
    writer.begin(name)
    yield from read_object(reader, writer.arguments)
    writer.finish()
    return True, ""


def _spelt(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_spelt(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelt, value)) + "]"
    return f"{ESCAPE}{value}{ESCAPE}" if isinstance(value, str) else json.dumps(value)
