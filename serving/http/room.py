# SPDX-License-Identifier: Apache-2.0
"""`Room`: the memory that large bodies may take together while they are read and decoded."""

import asyncio
from collections import deque
from types import TracebackType


class Room:
    """Bytes that are `taken`, and who waits for some: first come, first served."""

    def __init__(self):
        self._waiting: deque[tuple[asyncio.Future, int]] = deque()
        self.taken = 0

    async def take(self, num_bytes: int, total: int) -> None:
        """Comes back when the bytes are the caller's, of the `total` that there are."""
        if not self._waiting and self.taken + num_bytes <= total:
            self.taken += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, num_bytes))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit(total)
            else:
                self.give_back(num_bytes, total)
            raise

    def give_back(self, num_bytes: int, total: int) -> None:
        """Ends what `take` began; who waits and fits now gets theirs."""
        self.taken -= num_bytes
        self._admit(total)

    def _admit(self, total: int) -> None:
        while self._waiting:
            turn, num_bytes = self._waiting[0]
            if not turn.cancelled():
                if self.taken + num_bytes > total:
                    break
                self.taken += num_bytes
                turn.set_result(None)
            self._waiting.popleft()


class Place:
    """A context in which one body has what it took of the `total` in a room."""

    def __init__(self, room: Room, total: int):
        self._room, self._total = room, total
        self._num_bytes = 0
        self.is_waiting = False

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._num_bytes:
            self._room.give_back(self._num_bytes, self._total)

    async def take(self, num_bytes: int) -> None:
        """Comes back when there is room for so many, or, above the total, all of it is this body's; once it has some
        at once."""
        if self._num_bytes == 0:
            wanted = min(num_bytes, self._total)
            self.is_waiting = True
            await self._room.take(wanted, self._total)
            self._num_bytes, self.is_waiting = wanted, False
