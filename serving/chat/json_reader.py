# SPDX-License-Identifier: Apache-2.0
"""JSON read as it comes: checked character by character, and passed on at once."""

import re
from collections.abc import Generator

from serving.chat.reader import Emit, Reader

# Deeper than any schema goes; what is deeper is no call.
MAX_DEPTH = 200
Reading = Generator[None, None, bool]

_NO_PLAIN = re.compile(r'["\\\x00-\x1f]')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_NUMERIC = frozenset("+-.0123456789eE")


def read_value(reader: Reader, emit: Emit) -> Reading:
    """Whether a whole JSON value came; what of it was read goes to `emit`, blanks within it too.

    Where it is none, the first character that cannot belong to it stays unread.
    """
    inside = ""  # the brackets that are open
    while True:
        character = yield from reader.peek()
        if character in _CLOSING and character:
            if len(inside) == MAX_DEPTH:
                return False
            read(reader, emit, character)
            inside += character
            emit((yield from reader.blanks()))
            if (yield from reader.peek()) != _CLOSING[character]:
                if character == "{" and not (yield from _read_key(reader, emit)):
                    return False
                continue
        elif not (yield from _read_scalar(reader, emit, character)):
            return False
        while inside:
            emit((yield from reader.blanks()))
            character = yield from reader.peek()
            if character == ",":
                break
            if character != _CLOSING[inside[-1]]:
                return False
            read(reader, emit, character)
            inside = inside[:-1]
        if not inside:
            return True
        read(reader, emit, ",")
        emit((yield from reader.blanks()))
        if inside[-1] == "{" and not (yield from _read_key(reader, emit)):
            return False


def read_string(reader: Reader, emit: Emit) -> Reading:
    """As `read_value`, for a string; its quote comes next."""
    read(reader, emit, '"')
    while character := (yield from reader.peek()):
        if run := reader.run(_NO_PLAIN):
            emit(run)
        elif character == '"':
            read(reader, emit, character)
            return True
        elif character != "\\" or not (yield from _read_escape(reader, emit)):
            return False
    return False


def read(reader: Reader, emit: Emit, character: str) -> None:
    """Nothing; the `character` that was peeked at is read and passed on."""
    reader.step()
    emit(character)


def is_scalar(text: str) -> bool:
    """Whether this is a JSON number, true, false or null."""
    return text in _WORDS or _NUMBER.fullmatch(text) is not None


def _read_key(reader: Reader, emit: Emit) -> Reading:
    """A key, its colon and the blanks around them."""
    if (yield from reader.peek()) != '"' or not (yield from read_string(reader, emit)):
        return False
    emit((yield from reader.blanks()))
    if (yield from reader.peek()) != ":":
        return False
    read(reader, emit, ":")
    emit((yield from reader.blanks()))
    return True


def _read_escape(reader: Reader, emit: Emit) -> Reading:
    read(reader, emit, "\\")
    character = yield from reader.peek()
    if not character or character not in '"\\/bfnrtu':
        return False
    read(reader, emit, character)
    for _ in range(4 if character == "u" else 0):
        digit = yield from reader.peek()
        if digit not in _HEX:
            return False
        read(reader, emit, digit)
    return True


def _read_scalar(reader: Reader, emit: Emit, character: str) -> Reading:
    if character == '"':
        return (yield from read_string(reader, emit))
    for word in _WORDS:
        if character == word[0]:
            came = yield from reader.word(word)
            emit(came)
            return came == word
    number = yield from reader.name(_NUMERIC)
    emit(number)
    return is_scalar(number)
