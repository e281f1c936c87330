# SPDX-License-Identifier: Apache-2.0
"""`Outbox`: what waits for the reader of one call. However slow the reader, it holds each answer at most once."""

import asyncio
from collections import deque

from serving.core.errors import ServiceError
from serving.core.events import Delta, Event


class Outbox:
    """Events of one call, in order, on the event loop. Deltas of an answer that nobody has taken become one.

    So its size is bounded by the answers themselves, and the engine never waits for a reader.
    """

    def __init__(self):
        self._events: deque[Event] = deque()
        self._open: dict[int, _Gathered] = {}
        self._error: ServiceError | None = None
        self._ready = asyncio.Event()

    def put(self, event: Event) -> None:
        """Adds an event; an `Ended` closes its answer's deltas."""
        if isinstance(event, Delta):
            gathered = self._open.get(event.index)
            if gathered is None:
                self._open[event.index] = gathered = _Gathered(event.index)
                self._events.append(gathered)
            gathered.add(event)
        else:
            self._events.append(event)
        self._ready.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the call: the reader gets `error` at once, in the place of what waits."""
        self._error = self._error or error
        self._ready.set()

    async def take(self) -> Event:
        """The next event, when there is one. Raises the `ServiceError` that ended the call."""
        while not self._events and self._error is None:
            self._ready.clear()
            await self._ready.wait()
        if self._error is not None:
            raise self._error
        event = self._events.popleft()
        if isinstance(event, _Gathered):
            del self._open[event.index]
            return event.whole()
        return event


class _Gathered:
    """Deltas of one answer on the way to becoming one."""

    def __init__(self, index: int):
        self.index = index
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def whole(self) -> Delta:
        if len(self._deltas) == 1:
            return self._deltas[0]
        return Delta(
            self.index,
            "".join([delta.text for delta in self._deltas]),
            tuple([token for delta in self._deltas for token in delta.token_ids]),
            tuple([one for delta in self._deltas for one in delta.logprobs]),
            self._deltas[-1].usage,
        )
