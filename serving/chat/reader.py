# SPDX-License-Identifier: Apache-2.0
"""`Reader`: the characters of an answer, for the program of a dialect.

A program is a generator that yields where it needs more text. It reads like one that has the whole text, and what it
makes of a text does not depend on how this is cut. Its parts are `yield from` it.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import final

Program = Generator[None, None, None]
Emit = Callable[[str], None]
BLANKS = " \t\r\n"


@final
class Marks:
    """Words to look for; none is the beginning of another."""

    def __init__(self, words: Iterable[str]):
        self.words = frozenset(words)
        self.beginnings = frozenset(word[:end] for word in self.words for end in range(1, len(word)))
        initials = "".join(re.escape(word[0]) for word in self.words)
        # Where no word begins, and no blank that may stand before one.
        self.interesting = re.compile(f"[{initials}{BLANKS}]")


@final
class Reader:
    """A text that comes in pieces."""

    def __init__(self):
        self._text, self._place, self._ended = "", 0, False
        self._cut = self._is_starved = False
        self._only_calls = False

    def give(self, text: str) -> None:
        """Nothing; `text` comes next. All that was given before has been read."""
        assert self._place == len(self._text), "text was given before the last was read"
        self._text, self._place = text, 0

    def end(self, cut: bool = False, only_calls: bool = False) -> None:
        """Nothing; no more comes, though it was to where the answer was `cut` off. One of `only_calls` has no text."""
        self._ended, self._cut, self._only_calls = True, cut, only_calls

    @property
    def broke_off(self) -> bool:
        """Whether the answer was cut off where the program wanted to read on. What it has read since is no text but
        the format's, as far as it got."""
        return self._cut and self._is_starved

    def is_begun(self, came: str, word: str) -> bool:
        """Whether `came`, with which the answer ended, is a word of the format that was cut off. Three signs or
        fewer are as likely text, as a fence or the beginning of a tag is."""
        return self.broke_off and word.startswith(came) and (self._only_calls or len(came) > 3)

    def unread(self, text: str) -> None:
        """Nothing; `text`, which was read, comes next again."""
        self._text, self._place = text + self._text[self._place :], 0
        self._is_starved = False

    def peek(self) -> Generator[None, None, str]:
        """The next character, which stays; "" at the end."""
        while self._place == len(self._text):
            if self._ended:
                self._is_starved = True
                return ""
            yield
        return self._text[self._place]

    def step(self) -> None:
        """Nothing; the character last peeked at is read."""
        self._place += 1

    def run(self, stop: re.Pattern[str]) -> str:
        """The characters at hand before the first that `stop` finds, now read."""
        found = stop.search(self._text, self._place)
        start, self._place = self._place, found.start() if found else len(self._text)
        return self._text[start : self._place]

    def rest(self, emit: Emit) -> Program:
        """Nothing; all that comes goes to `emit`."""
        while (yield from self.peek()):
            start, self._place = self._place, len(self._text)
            emit(self._text[start:])

    def blanks(self) -> Generator[None, None, str]:
        """The blanks that come next, now read."""
        read = ""
        while (character := (yield from self.peek())) and character in BLANKS:
            self.step()
            read += character
        return read

    def word(self, word: str) -> Generator[None, None, str]:
        """As much of `word` as the text goes on with, now read: all of it, if it is there."""
        for place, wanted in enumerate(word):
            if (yield from self.peek()) != wanted:
                return word[:place]
            self.step()
        return word

    def name(self, characters: frozenset[str]) -> Generator[None, None, str]:
        """What comes next of these characters, now read."""
        read = ""
        while (character := (yield from self.peek())) and character in characters:
            self.step()
            read += character
        return read

    def run_until(self, characters: str) -> Generator[None, None, str]:
        """What comes before the first of these characters, now read."""
        read = ""
        while (character := (yield from self.peek())) and character not in characters:
            self.step()
            read += character
        return read

    def until(self, marks: Marks, emit: Emit) -> Generator[None, None, tuple[str, str]]:
        """The first of `marks` in what comes and the blanks before it, now read; two empty texts at the end.

        The text before these goes to `emit`. Held back is only what may still turn out to belong to a mark.
        """
        blanks, held = "", ""
        while character := (yield from self.peek()):
            if not held and (run := self.run(marks.interesting)):
                emit(blanks + run)
                blanks = ""
                continue
            self.step()
            held += character
            while held and held not in marks.beginnings:
                if held in marks.words:
                    return blanks, held
                # No mark begins here, but perhaps one does behind it.
                if held[0] in BLANKS:
                    blanks += held[0]
                else:
                    emit(blanks + held[0])
                    blanks = ""
                held = held[1:]
        if not any(self.is_begun(held, word) for word in marks.words):
            emit(blanks + held)
        return "", ""
