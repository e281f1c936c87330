# SPDX-License-Identifier: Apache-2.0
"""`Writer`: the parts of an answer, from the program of a dialect."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import final

from serving.chat.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from serving.chat.reader import Reader
from serving.chat.tools import Tool


@final
class Writer:
    """`tools` are those that may be called, by name; `new_id` makes the id of a call. `called`: one has begun."""

    def __init__(self, tools: Mapping[str, Tool], new_id: Callable[[], str]):
        self.tools = tools
        self.called = False
        self._new_id = new_id
        self._num_calls = 0
        self._parts: list[Part] = []

    def content(self, text: str) -> None:
        """Nothing; more text for the reader."""
        if text:
            self._parts.append(Content(text))

    def no_call(self, text: str, reader: Reader) -> None:
        """Nothing; `text` was read for a call and is none: it is for the reader, unless it was cut off first."""
        if not reader.broke_off:
            self.content(text)

    def reasoning(self, text: str) -> None:
        """Nothing; more of what the model thinks."""
        if text:
            self._parts.append(Reasoning(text))

    def begin(self, name: str) -> None:
        """Nothing; a call of the tool `name` has begun."""
        self.called = True
        self._parts.append(CallBegun(self._num_calls, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Nothing; more of the arguments of the call that has begun."""
        if text:
            self._parts.append(CallArguments(self._num_calls, text))

    def finish(self) -> None:
        """Nothing; the call that has begun is over."""
        self._parts.append(CallEnded(self._num_calls))
        self._num_calls += 1

    def take(self) -> list[Part]:
        """The parts since the last time, as few as they can be."""
        parts, self._parts = self._parts, []
        return merged(parts)


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts, texts of one kind that follow each other as one."""
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        if runs and type(runs[-1][0]) is type(part) and isinstance(part, Content | Reasoning | CallArguments):
            runs[-1][1].append(part.text)
        else:
            runs.append((part, []))
    return [_grown(first, more) for first, more in runs]


def _grown(first: Part, more: list[str]) -> Part:
    return replace(first, text="".join((first.text, *more))) if more else first
