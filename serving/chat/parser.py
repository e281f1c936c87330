# SPDX-License-Identifier: Apache-2.0
"""`AnswerParser`: an answer's text, as it comes, in parts."""

from collections.abc import Callable, Mapping
from typing import final

from serving.chat.dialects.api import AbstractDialect
from serving.chat.parts import Part
from serving.chat.reader import Program, Reader
from serving.chat.reasoning import Thinking, read_reasoning
from serving.chat.tools import Tool
from serving.chat.words import WordFilter
from serving.chat.writer import Writer


@final
class AnswerParser:
    """One answer. Joined, the parts of all texts are the same however these are cut, and a tag never shows in part.

    Of `dialect` None no calls are looked for. The words `dropped` are left out wherever they stand. With `only_calls`
    the answer has no text.
    """

    def __init__(
        self,
        dialect: AbstractDialect | None = None,
        tools: Mapping[str, Tool] | None = None,
        thinking: Thinking | None = None,
        dropped: tuple[str, ...] = (),
        new_id: Callable[[], str] | None = None,
        only_calls: bool = False,
    ):
        self._only_calls = only_calls
        self._reader = Reader()
        self._writer = Writer(tools or {}, new_id or (dialect.new_id if dialect else str))
        self._filter = WordFilter(dropped)
        self._program = self._answer(dialect, thinking)
        next(self._program)

    def feed(self, text: str) -> list[Part]:
        """What is new by `text`, which comes next."""
        text = self._filter.feed(text)
        if text:
            self._reader.give(text)
            next(self._program)
        return self._writer.take()

    def end(self, cut: bool = False) -> list[Part]:
        """What is left: the answer is over, by its own end or `cut` off. A call that was cut off ends with what it has
        of arguments; where not even its name had come, it is left out."""
        if text := self._filter.end():
            self._reader.give(text)
            next(self._program)
        # Within a call there is no text, and behind it are but others.
        self._reader.end(cut, self._only_calls or self._writer.called)
        for _ in self._program:
            raise AssertionError("a program wants to read past the end")
        return self._writer.take()

    def _answer(self, dialect: AbstractDialect | None, thinking: Thinking | None) -> Program:
        if thinking is not None:
            yield from read_reasoning(self._reader, self._writer, thinking)
        if dialect is not None:
            yield from dialect.program(self._reader, self._writer)
        yield from self._reader.rest(self._writer.content)
