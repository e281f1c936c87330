# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and others that know tools from the prompt alone: a JSON object in a fenced block."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import call_object, json_calls, long_id, tool_lines
from serving.chat.dialects.llama3 import read_bare_calls, read_leading_calls
from serving.chat.lark import literal
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

OPEN, CLOSE = "```tool_code", "```"
# Calls stand in blocks of this kind, too, and whatever else is JSON.
JSON = "```json"
_MARKS = Marks((OPEN, "```tool_call", JSON))


@final
class Fenced(AbstractDialect):
    """```` ```tool_code ````, `{"name": …, "parameters": {…}}` and ```` ``` ````, each on its line."""

    def recognizes(self, template: str) -> bool:
        return "<start_of_turn>" in template

    @property
    def words(self) -> tuple[str, ...]:
        return ()

    def program(self, reader: Reader, writer: Writer) -> Program:
        yield from read_leading_calls(reader, writer)
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            if not (yield from read_bare_calls(reader, writer, before + mark + blanks, tagged=mark != JSON)):
                continue
            yield from reader.blanks()
            closing = yield from reader.word(CLOSE)
            if closing == CLOSE:
                yield from reader.blanks()
            else:
                writer.no_call(closing, reader)

    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        one, rules = json_calls(tools, "parameters")
        call = f"{literal(chr(10))} {one} {literal(chr(10) + CLOSE)}"
        return CallForm(OPEN, "call", f"{literal(chr(10) + OPEN)} call", "", (f"call: {call}", *rules))

    def new_id(self) -> str:
        return long_id()

    def fitted(self, messages: Messages) -> Messages:
        return messages

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            f"You can call functions. Their signatures, one a line:\n{tool_lines(tools)}\n"
            "To call one, answer with its name and arguments as JSON in a block like this, one for each call:\n"
            f'{OPEN}\n{{"name": <function name>, "parameters": <JSON object>}}\n{CLOSE}'
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(f"{OPEN}\n{call_object(call, 'parameters')}\n{CLOSE}" for call in calls)

    def spelt_result(self, name: str, content: str) -> str:
        return f"```tool_output\n{name}: {content}\n```"
