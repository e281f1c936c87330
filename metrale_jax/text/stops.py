# SPDX-License-Identifier: Apache-2.0
"""`StopMatcher`: finds stop strings in a text that arrives in pieces, and holds back what may become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from metrale_jax.core.errors import RequestError


@dataclass(frozen=True)
class StopPatterns:
    """Stop strings, each once, with the automata that find them (see `StopMatcher`); many streams may share them."""

    strings: tuple[str, ...]
    borders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, strings: Sequence[str]) -> Self:
        """The patterns of these strings. Raises `RequestError` for an empty one."""
        unique = tuple(dict.fromkeys((strings,) if isinstance(strings, str) else strings))
        if "" in unique:
            raise RequestError("stop has an empty string, which would match everywhere; leave it out.", "stop")
        return cls(unique, tuple(map(_borders, unique)))


@final
class StopMatcher:
    """Watches one stream for any of the `patterns`.

    The stop string that is complete first wins, which makes the outcome independent of how the text is cut into
    pieces and never waits for a longer one. Where several end at the same character, the longest wins: it starts
    first, and all that belongs to it is left out. The text up to its beginning is released, and with
    `include_stop_str_in_output` the stop string itself; what follows it in the same piece is dropped.

    Each stop string is followed by its own Knuth-Morris-Pratt automaton, so a character costs amortised constant time
    a stop string, however long these are.
    """

    def __init__(self, patterns: StopPatterns, include_stop_str_in_output: bool = False):
        self._stops, self._borders = patterns.strings, patterns.borders
        self._initials = {stop[0] for stop in self._stops}
        self._matched = [0] * len(self._stops)
        self._include = include_stop_str_in_output
        self._held = ""
        self._done = False

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be released now, and the stop string that has been met, if one has.

        One that is complete within a text that may not stop is passed over. After a match nothing more may be pushed.
        """
        assert not self._done, "text was pushed after a stop string had been met"
        if not self._held and not any(initial in text for initial in self._initials):
            return text, None
        for index, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None and may_stop:
                seen = self._held + text[: index + 1]
                self._held, self._done = "", True
                return (seen if self._include else seen[: len(seen) - len(stop)]), stop
        seen = self._held + text
        released = len(seen) - max(self._matched, default=0)
        self._held = seen[released:]
        return seen[:released], None

    def finish(self) -> str:
        """The text still held back, when the stream ends without a stop string; empty after a match."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton on by one character; the longest stop string that it completes, if any."""
        met = None
        for which, stop in enumerate(self._stops):
            length = self._matched[which]
            while length and stop[length] != character:
                length = self._borders[which][length - 1]
            length += stop[length] == character
            if length == len(stop):
                met = stop if met is None or length > len(met) else met
                length = self._borders[which][-1]
            self._matched[which] = length
        return met


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    for end in range(1, len(pattern)):
        length = borders[end - 1]
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        borders[end] = length + (pattern[length] == pattern[end])
    return tuple(borders)
