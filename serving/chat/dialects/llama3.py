# SPDX-License-Identifier: Apache-2.0
"""Llama 3: a JSON object with name and parameters, bare at the beginning of the answer or behind `<|python_tag|>`."""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, final

from serving.chat.call_reader import may_be_call, read_call
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import argument_rules, call_object, long_id, tool_lines
from serving.chat.lark import either, literal
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

TAG = "<|python_tag|>"
_MARKS = Marks((TAG,))
# What a model may write between the signs of JSON.
_BLANKS = "[ \\t\\r\\n]{0,4}"


@final
class Llama3(AbstractDialect):
    """`{"name": …, "parameters": {…}}`, several of them joined by `; `."""

    def recognizes(self, template: str) -> bool:
        return TAG in template or "<|start_header_id|>" in template

    @property
    def words(self) -> tuple[str, ...]:
        return (TAG,)

    def program(self, reader: Reader, writer: Writer) -> Program:
        yield from read_leading_calls(reader, writer)
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            yield from read_bare_calls(reader, writer, before + mark + blanks, tagged=True)

    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        opened = [_opening(f'"{re.escape(tool.name)}"') for tool in tools]
        calls = [f"OPEN_{index} args_{index} {literal('}')}" for index in range(len(tools))]
        rules = [f"OPEN_{index}: /{opening}\\x20?/" for index, opening in enumerate(opened)]
        bare = _opening(f'"({"|".join(re.escape(tool.name) for tool in tools)})"')
        tag = TAG if TAG in model.special_tokens else ""
        rules = (f"call: {either(calls)}", *rules, *argument_rules(tools))
        return CallForm(tag, "call", f"{literal('; ')} call", "", rules, bare)

    def new_id(self) -> str:
        return long_id()

    def fitted(self, messages: Messages) -> Messages:
        """One call a message, its result behind it: Llama's own templates refuse more."""
        fitted: Messages = []
        for message in messages:
            calls = message.get("tool_calls") or ()
            if len(calls) < 2:
                fitted.append(message)
                continue
            first, *others = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
            fitted += [{**message, **first, "content": message["content"]}, *others]
        return _results_behind_calls(fitted)

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            f"You can call functions. Their signatures, one a line:\n{tool_lines(tools)}\n"
            "To call one, answer with nothing but its name and arguments as JSON: "
            '{"name": <function name>, "parameters": <JSON object>}. Join several calls by "; ".'
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "; ".join(call_object(call, "parameters") for call in calls)

    def spelt_result(self, name: str, content: str) -> str:
        return json.dumps({"name": name, "output": content}, ensure_ascii=False)


def read_leading_calls(reader: Reader, writer: Writer) -> Program:
    """Nothing; calls that begin an answer are read."""
    blanks = yield from reader.blanks()
    if (yield from reader.peek()) == "{":
        yield from read_bare_calls(reader, writer, blanks)
    else:
        reader.unread(blanks)


def read_bare_calls(reader: Reader, writer: Writer, before: str, tagged: bool = False) -> Generator[None, None, bool]:
    """Whether there were calls, joined by semicolons or blanks. If none, `before` and what was read is content. What is
    not `tagged` and cut off is that, too, if it may as well be JSON of another kind."""
    called, seen = yield from read_call(reader, writer)
    if not called:
        if tagged or may_be_call(seen, writer.tools):
            writer.no_call(before + seen, reader)
        else:
            writer.content(before + seen)
        return False
    while called:
        yield from reader.blanks()
        joined = yield from reader.word(";")
        joined += yield from reader.blanks()
        if (yield from reader.peek()) != "{":
            writer.no_call(joined, reader)
            return True
        called, seen = yield from read_call(reader, writer)
    writer.no_call(joined + seen, reader)
    return True


def _opening(name: str) -> str:
    """A pattern of a call up to its arguments."""
    signs = ("", "\\{", '"name"', ":", name, ",", '"(parameters|arguments)"', ":")
    return _BLANKS.join(signs)


def _results_behind_calls(messages: Messages) -> Messages:
    """Each result moved to behind the call that it answers."""
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    placed: Messages = []
    for message in messages:
        if message["role"] != "tool":
            placed.append(message)
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            placed += [results.pop(call_id) for call_id in ids if call_id in results]
        elif results.get(message.get("tool_call_id")) is message:
            placed.append(results.pop(message.get("tool_call_id")))
    return placed
