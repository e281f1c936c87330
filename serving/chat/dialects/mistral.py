# SPDX-License-Identifier: Apache-2.0
"""Mistral: `[TOOL_CALLS]` and a list of calls, or, in newer models, before each call its name and `[ARGS]`."""

import hashlib
import json
import secrets
import string
from collections.abc import Generator, Mapping, Sequence
from typing import Any, final

from serving.chat.call_reader import read_call
from serving.chat.dialects.api import AbstractDialect, Messages
from serving.chat.dialects.common import argument_rules, call_object, json_calls, tool_lines
from serving.chat.json_reader import read_value
from serving.chat.lark import either, literal, word
from serving.chat.model import ChatModel
from serving.chat.reader import Marks, Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# Its templates refuse ids of any other form.
ID_LENGTH = 9
_LETTERS = string.ascii_letters + string.digits
_MARKS = Marks((TAG,))
_NAME = frozenset(_LETTERS + "_-.")


@final
class Mistral(AbstractDialect):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` once for each call."""

    def recognizes(self, template: str) -> bool:
        return TAG in template

    @property
    def words(self) -> tuple[str, ...]:
        return (TAG, ARGS, CALL_ID)

    def program(self, reader: Reader, writer: Writer) -> Program:
        while True:
            before, mark = yield from reader.until(_MARKS, writer.content)
            if not mark:
                return
            blanks = yield from reader.blanks()
            listed = (yield from reader.peek()) == "["
            called, seen = yield from (_read_list if listed else _read_named)(reader, writer)
            if called:
                yield from reader.blanks()
            else:
                writer.no_call(before + mark + blanks + seen, reader)

    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        if not _is_new(model):
            one, rules = json_calls(tools, "arguments")
            # Older tokenizers put a space before the list.
            return CallForm(
                TAG, f"OPENING {one}", f"{literal(', ')} {one}", literal("]"), ("OPENING: /\\x20?\\[/", *rules)
            )
        tag, args = (word(text, model.special_tokens) for text in (TAG, ARGS))
        calls = [f"{literal(tool.name)} {args} args_{index}" for index, tool in enumerate(tools)]
        return CallForm(TAG, "call", f"{tag} call", "", (f"call: {either(calls)}", *argument_rules(tools)))

    def new_id(self) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(ID_LENGTH))

    def fitted(self, messages: Messages) -> Messages:
        """Ids of nine letters and digits, from whatever was sent."""
        fitted: Messages = []
        for message in messages:
            changed = dict(message)
            if message.get("tool_calls"):
                changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
            if message.get("tool_call_id") is not None:
                changed["tool_call_id"] = _short_id(message["tool_call_id"])
            fitted.append(changed)
        return fitted

    def described(self, tools: Sequence[Tool]) -> str:
        return (
            f"You can call functions. Their signatures, one a line:\n{tool_lines(tools)}\n"
            f"To call some, answer with {TAG} and a JSON list of their names and arguments: "
            f'{TAG}[{{"name": <function name>, "arguments": <JSON object>}}]'
        )

    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return f"{TAG}[{', '.join(call_object(call, 'arguments') for call in calls)}]"

    def spelt_result(self, name: str, content: str) -> str:
        return f"[TOOL_RESULTS]{json.dumps({'name': name, 'content': content}, ensure_ascii=False)}[/TOOL_RESULTS]"


def _is_new(model: ChatModel) -> bool:
    # Tokenizers know the word before templates use it.
    return ARGS in model.template


def _read_list(reader: Reader, writer: Writer) -> Generator[None, None, tuple[bool, str]]:
    """Whether there were calls in the list that comes next, and if not, what was read."""
    reader.step()
    any_called, between = False, "["
    while True:
        between += yield from reader.blanks()
        called, seen = yield from read_call(reader, writer)
        if not called:
            break
        any_called = True
        yield from reader.blanks()
        between = yield from reader.peek()
        if not between or between not in ",]":
            return True, ""
        reader.step()
        if between == "]":
            return True, ""
    if any_called:
        writer.no_call(between + seen, reader)
    return any_called, between + seen


def _read_named(reader: Reader, writer: Writer) -> Generator[None, None, tuple[bool, str]]:
    """Whether there was a call next, and if not, what was read."""
    name = yield from reader.name(_NAME)
    seen = name
    if name not in writer.tools:
        return False, seen
    for mark in (CALL_ID, ARGS):
        came = yield from reader.word(mark)
        seen += came
        if mark == CALL_ID and came == mark:
            seen += yield from reader.name(_NAME)
        elif mark == CALL_ID and came == "[":
            # Both marks begin alike.
            reader.unread(came)
            seen = seen.removesuffix(came)
        elif came not in ("", mark) and not reader.broke_off:
            return False, seen
    blanks = yield from reader.blanks()
    if (yield from reader.peek()) != "{" and not (reader.broke_off and seen != name):
        return False, seen + blanks
    writer.begin(name)
    yield from read_value(reader, writer.arguments)
    writer.finish()
    return True, ""


def _short_id(given: str) -> str:
    if len(given) == ID_LENGTH and given.isalnum() and given.isascii():
        return given
    digest = hashlib.sha256(given.encode("utf-8", "replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:ID_LENGTH])
