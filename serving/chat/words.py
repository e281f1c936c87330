# SPDX-License-Identifier: Apache-2.0
"""`WordFilter`: a text that comes in pieces, without some words."""

import re
from collections.abc import Iterable
from typing import final


@final
class WordFilter:
    """Where several words begin at one place, the longest goes. What may become a word is held back."""

    def __init__(self, words: Iterable[str]):
        words = sorted(filter(None, words), key=len, reverse=True)
        self._words = re.compile("|".join(map(re.escape, words))) if words else None
        self._beginnings = {word[:end] for word in words for end in range(1, len(word))}
        self._longest = max(map(len, words), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text, and of what was held back, is sure to stay."""
        if self._words is None:
            return text
        text, place, kept = self._held + text, 0, []
        while True:
            found = self._words.search(text, place)
            # One that begins earlier may be on its way.
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
        return self._words.sub("", text) if self._words else text

    def _begun(self, text: str, start: int, limit: int) -> int | None:
        """The first place from `start` up to `limit` from where the rest of the text may be a word's beginning."""
        places = range(max(start, len(text) - self._longest + 1), limit)
        return next((place for place in places if text[place:] in self._beginnings), None)
