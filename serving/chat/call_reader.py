# SPDX-License-Identifier: Apache-2.0
"""`read_call`: a call that is written as a JSON object with its name and its arguments."""

import json
import re
from collections.abc import Collection, Generator
from typing import final

from serving.chat.json_reader import read, read_string, read_value
from serving.chat.reader import Reader
from serving.chat.writer import Writer

# Models mix these up.
ARGUMENT_KEYS = ("arguments", "parameters")
# As much as there may be of a call before its name is known.
_HEAD = re.compile(r'\{\s*("(n|na|nam|name("\s*(:\s*("(?P<name>[^"\\]*))?)?)?)?)?')


def read_call(reader: Reader, writer: Writer) -> Generator[None, None, tuple[bool, str]]:
    """Whether a call came, and if none did, what was read.

    It begins once its name is known, that of a tool, and ends at the object's end or at the first character that
    cannot belong to it, which stays unread. Arguments are passed on as they come, from their name on. Where it is cut
    off between its name and its arguments these are empty.
    """
    call = _Call(reader, writer)
    whole = yield from call.read()
    if call.begun:
        writer.finish()
        return True, ""
    if call.name and (whole or reader.broke_off):
        writer.begin(call.name)
        writer.arguments(call.early or ("{}" if whole else ""))
        writer.finish()
        return True, ""
    return False, "".join(call.seen)


def may_be_call(seen: str, tools: Collection[str]) -> bool:
    """Whether `seen`, JSON that is cut off, is no more than the beginning of an object with the name of a tool."""
    found = _HEAD.fullmatch(seen)
    return found is not None and any(tool.startswith(found["name"] or "") for tool in tools)


@final
class _Call:
    """`seen` is what was read before the call began."""

    def __init__(self, reader: Reader, writer: Writer):
        self._reader, self._writer = reader, writer
        self.seen: list[str] = []
        self.name, self.early, self.begun = "", "", False

    def read(self) -> Generator[None, None, bool]:
        """Whether it is whole."""
        if (yield from self._reader.peek()) != "{":
            return False
        self._step("{")
        while True:
            self.seen.append((yield from self._reader.blanks()))
            if not (yield from self._member()):
                return False
            self.seen.append((yield from self._reader.blanks()))
            character = yield from self._reader.peek()
            if character not in (",", "}"):
                return False
            self._step(character)
            if character == "}":
                return True

    def _member(self) -> Generator[None, None, bool]:
        key: list[str] = []
        if (yield from self._reader.peek()) != '"' or not (yield from self._noted(read_string, key)):
            return False
        self.seen.append((yield from self._reader.blanks()))
        if (yield from self._reader.peek()) != ":":
            return False
        self._step(":")
        self.seen.append((yield from self._reader.blanks()))
        meaning = "".join(key)[1:-1]
        if meaning == "name" and not self.name:
            return (yield from self._read_name())
        if meaning in ARGUMENT_KEYS and not self.begun and not self.early:
            return (yield from self._read_arguments())
        return (yield from self._noted(read_value, []))

    def _read_name(self) -> Generator[None, None, bool]:
        value: list[str] = []
        if (yield from self._reader.peek()) != '"' or not (yield from self._noted(read_string, value)):
            return False
        self.name = json.loads("".join(value))
        if self.name not in self._writer.tools:
            self.name = ""
            return False
        return True

    def _read_arguments(self) -> Generator[None, None, bool]:
        if (yield from self._reader.peek()) != "{":
            return False
        if not self.name:
            early: list[str] = []
            whole = yield from self._noted(read_value, early)
            self.early = "".join(early)
            return whole
        self.begun = True
        self._writer.begin(self.name)
        return (yield from read_value(self._reader, self._writer.arguments))

    def _noted(self, reading, into: list[str]) -> Generator[None, None, bool]:
        def note(text: str) -> None:
            into.append(text)
            self.seen.append(text)

        return (yield from reading(self._reader, note))

    def _step(self, character: str) -> None:
        read(self._reader, self.seen.append, character)
