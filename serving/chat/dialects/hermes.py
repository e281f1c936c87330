# SPDX-License-Identifier: Apache-2.0
"""Hermes and Qwen: `<tool_call>` around a JSON object with name and arguments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

from serving.chat.call_reader import read_call
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import call_object, json_calls, long_id, tool_lines
from serving.chat.lark import literal, word
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKS = Marks((OPEN,))


@final
class Hermes(AbstractDialect):
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, several of them on lines of their own."""

    def recognizes(self, template: str) -> bool:
        return OPEN in template

    @property
    def words(self) -> tuple[str, ...]:
        return (OPEN, CLOSE)

    def program(self, reader: Reader, writer: Writer) -> Program:
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            called, seen = yield from read_call(reader, writer)
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
        one, rules = json_calls(tools, "arguments")
        opening, closing = (word(text, model.special_tokens) for text in (OPEN, CLOSE))
        call = f"{literal(chr(10))} {one} {literal(chr(10))} {closing}"
        return CallForm(OPEN, "call", f"{literal(chr(10))} {opening} call", "", (f"call: {call}", *rules))

    def new_id(self) -> str:
        return long_id()

    def fitted(self, messages: Messages) -> Messages:
        return messages

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            "You can call functions. Their signatures are in these tags:\n"
            f"<tools>\n{tool_lines(tools)}\n</tools>\n"
            "To call one, answer with its name and arguments as JSON in these tags, once for each call:\n"
            f'{OPEN}\n{{"name": <function name>, "arguments": <JSON object>}}\n{CLOSE}'
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(f"{OPEN}\n{call_object(call, 'arguments')}\n{CLOSE}" for call in calls)

    def spelt_result(self, name: str, content: str) -> str:
        return (
            f"<tool_response>\n{json.dumps({'name': name, 'content': content}, ensure_ascii=False)}\n</tool_response>"
        )
