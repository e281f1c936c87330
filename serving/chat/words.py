# SPDX-License-Identifier: Apache-2.0
"""`WordFilter`: a text that comes in pieces, without some words."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, final


@dataclass(frozen=True)
class _Patterns:
    """What finds the words, the beginnings that they have, and the longest one's length."""

    words: re.Pattern[str]
    beginnings: frozenset[str]
    longest: int

    @classmethod
    @lru_cache(maxsize=8)  # a model may have thousands of words, and always the same
    def of(cls, words: tuple[str, ...]) -> Self:
        """The patterns of these words. Where several begin at one place, the longest counts."""
        ordered = sorted(filter(None, words), key=len, reverse=True)
        found = re.compile("|".join(map(re.escape, ordered)))
        beginnings = frozenset(word[:end] for word in ordered for end in range(1, len(word)))
        return cls(found, beginnings, max(map(len, ordered), default=0))


@final
class WordFilter:
    """Where several words begin at one place, the longest goes. What may become a word is held back."""

    def __init__(self, words: tuple[str, ...]):
        self._patterns = _Patterns.of(words) if any(words) else None
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text, and of what was held back, is sure to stay."""
        if self._patterns is None:
            return text
        text, place, kept = self._held + text, 0, []
        while True:
            found = self._patterns.words.search(text, place)
            # One that begins earlier, or a longer one at the same place, may be on its way.
            limit = found.start() + 1 if found else len(text)
            begun = self._begun(text, place, limit)
            if begun is not None:
                self._held = text[begun:]
                return "".join((*kept, text[place:begun]))
            if found is None:
                self._held = ""
                return "".join((*kept, text[place:]))
            kept.append(text[place : found.start()])
            place = found.end()

    def end(self) -> str:
        """What is left."""
        text, self._held = self._held, ""
        return self._patterns.words.sub("", text) if self._patterns else text

    def _begun(self, text: str, start: int, limit: int) -> int | None:
        """The first place from `start` up to `limit` from where the rest of the text may be a word's beginning."""
        places = range(max(start, len(text) - self._patterns.longest + 1), limit)
        return next((place for place in places if text[place:] in self._patterns.beginnings), None)
