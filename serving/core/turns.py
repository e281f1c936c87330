# SPDX-License-Identifier: Apache-2.0
"""`Turns`: who is next into the engine, fair between keys. On the event loop."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class _Waiting(NamedTuple):
    """A call that waits, in the order of its key's calls."""

    background: bool
    priority: int
    arrival: int
    num_answers: int
    turn: asyncio.Future


@dataclass
class _Line:
    """One key's calls: so many inside, and those that wait."""

    num_inside: int = 0
    waiting: list[_Waiting] = field(default_factory=list)
    served: int = 0

    def head(self) -> _Waiting | None:
        """The next of those that still wait."""
        while self.waiting and self.waiting[0].turn.cancelled():
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


class Turns:
    """Lets answers into the engine while fewer than `max_inside()` are there; the rest wait here, not in its queue.

    Whose key has the fewest inside is next, of those the one that was served longest ago: a key that floods the server
    waits for itself. Of one key the lower priority is first, then who came first. Calls in the background wait until no
    other call of any key does.
    """

    def __init__(self, max_inside: Callable[[], int]):
        self._max_inside = max_inside
        self._lines: dict[str, _Line] = {}
        self._num_inside = self._num_served = 0
        self._arrivals = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return sum(not entry.turn.done() for line in self._lines.values() for entry in line.waiting)

    async def take(self, key_id: str, priority: int, num_answers: int, background: bool = False) -> "Turn":
        """The turn of a call, when it comes."""
        line = self._lines.setdefault(key_id, _Line())
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(line.waiting, _Waiting(background, priority, next(self._arrivals), num_answers, mine))
        self._admit()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._leave(key_id, num_answers)  # it had its turn in the moment it went
            self._forget(key_id)
            raise
        return Turn(lambda: self._leave(key_id, num_answers))

    def _admit(self) -> None:
        limit = self._max_inside()
        while True:
            lines = [line for line in self._lines.values() if line.head() is not None]
            if not lines:
                return
            line = min(lines, key=lambda one: (one.head().background, one.num_inside, one.served))
            num_answers = line.head().num_answers
            # One that is larger than all the room there is goes alone.
            if self._num_inside and self._num_inside + num_answers > limit:
                return
            mine = heapq.heappop(line.waiting).turn
            self._num_served += 1
            line.served = self._num_served
            line.num_inside += num_answers
            self._num_inside += num_answers
            mine.set_result(None)

    def _leave(self, key_id: str, num_answers: int) -> None:
        self._lines[key_id].num_inside -= num_answers
        self._num_inside -= num_answers
        self._forget(key_id)
        self._admit()

    def _forget(self, key_id: str) -> None:
        line = self._lines.get(key_id)
        if line is not None and not line.num_inside and line.head() is None:
            del self._lines[key_id]


class Turn:
    """A call that is in the engine, until `end`."""

    def __init__(self, leave: Callable[[], None]):
        self._leave: Callable[[], None] | None = leave

    def end(self) -> None:
        """It is no longer there, the first time this is called."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
