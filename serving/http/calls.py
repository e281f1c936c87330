# SPDX-License-Identifier: Apache-2.0
"""`CallsInFlight`: the calls under way, each of which ends when its client goes or the server says so."""

import asyncio
from types import TracebackType

from starlette.types import Receive

from serving.core.errors import Kind, ServiceError

TOO_MANY_RETRY_S = 1.0


class CallsInFlight:
    """`idle` is set while there is none. Once it is `draining`, none is let in."""

    def __init__(self):
        self._calls: set[Call] = set()
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: "Call", max_calls: int) -> None:
        """Counts the call in. Raises `ServiceError` (UNAVAILABLE) where none is taken, or too many are there."""
        if self.draining:
            raise _shutting_down()
        if len(self._calls) >= max_calls:
            raise ServiceError(
                Kind.UNAVAILABLE,
                f"{len(self._calls)} calls are open, and the limit is {max_calls}; come again in a moment.",
                retry_after_s=TOO_MANY_RETRY_S,
            )
        self._calls.add(call)
        self.idle.clear()

    def leave(self, call: "Call") -> None:
        """Counts it out."""
        self._calls.discard(call)
        if not self._calls:
            self.idle.set()

    def end_all(self) -> None:
        """Ends those that are left: they are told that the server shuts down."""
        for call in tuple(self._calls):
            call.end(_shutting_down())


class Call:
    """A context around one call. What `end` is told comes out of it, once what is inside was cancelled. One that only
    `asks` where the server stands is let in at any time.

    From `watch` on the client's going ends it (CANCELLED).
    """

    def __init__(self, calls: CallsInFlight, max_calls: int, asks: bool = False):
        self._calls, self._max_calls, self._asks = calls, max_calls, asks
        self._task: asyncio.Task | None = None
        self._watcher: asyncio.Task | None = None
        self._error: ServiceError | None = None

    async def __aenter__(self) -> "Call":
        if not self._asks:
            self._calls.enter(self, self._max_calls)
        self._task = asyncio.current_task()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if not self._asks:
            self._calls.leave(self)
        if self._error is not None:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise self._error from None

    def end(self, error: ServiceError) -> None:
        """Cancels what is inside, the first time."""
        if self._error is None:
            # What was cancelled leaves the record of it, where the service had heard of it.
            error.recorded = True
            self._error = error
            self._task.cancel()

    def watch(self, receive: Receive) -> None:
        """From now on ends with the client; nothing else may `receive` any more."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ServiceError(Kind.CANCELLED, "The client went before its answer was whole."))


def _shutting_down() -> ServiceError:
    return ServiceError(Kind.UNAVAILABLE, "the server is shutting down; try again, or another one.", retry_after_s=1.0)
