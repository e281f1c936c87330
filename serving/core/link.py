# SPDX-License-Identifier: Apache-2.0
"""`EngineLink`: the event loop's end of the engine thread. Orders go one way, reports come back to whose they are."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from serving.core.errors import ServiceError
from serving.core.events import Event
from serving.core.orders import Began, CancelOrder, Order, Report, Vectors


class AbstractReceiver(ABC):
    """Whoever has a job in the engine, on the event loop."""

    @abstractmethod
    def receive(self, news: Event | Began | Vectors, last: bool) -> None:
        """Takes news of the job; nothing is left of it in the engine with the `last`."""

    @abstractmethod
    def fail(self, error: ServiceError) -> None:
        """The job ended by an error."""


class EngineLink:
    """`put` hands an order to the engine thread. All but `deliver` and `sever` are for the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, put: Callable[[Order], None]):
        self._loop, self._put = loop, put
        self._ids = itertools.count(1)
        self._receivers: dict[int, AbstractReceiver] = {}
        self._severed: ServiceError | None = None

    def order(self, make: Callable[[int], Order], receiver: AbstractReceiver) -> int:
        """The id of a new job, whose reports come to `receiver`; `make(job_id)` is its order."""
        job_id = next(self._ids)
        if self._severed is not None:
            receiver.fail(self._severed)
            return job_id
        self._receivers[job_id] = receiver
        self._put(make(job_id))
        return job_id

    def cancel(self, job_id: int) -> None:
        """Ends a job that is not over."""
        if self._receivers.pop(job_id, None) is not None:
            self._put(CancelOrder(job_id))

    def deliver(self, reports: Sequence[Report]) -> None:
        """Takes the news of one step, in any thread: the loop is woken once for all of them."""
        self._call(self._sort, reports)

    def sever(self, error: ServiceError) -> None:
        """Ends every job with `error`, and those that would come, from any thread: nobody is there to do them."""
        self._call(self._fail_all, error)

    def _call(self, function: Callable, argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _sort(self, reports: Sequence[Report]) -> None:
        for report in reports:
            receiver = self._receivers.get(report.job_id)
            if receiver is None:
                continue  # it was cancelled meanwhile
            if report.last:
                del self._receivers[report.job_id]
            if isinstance(report.news, ServiceError):
                receiver.fail(report.news)
            else:
                receiver.receive(report.news, report.last)

    def _fail_all(self, error: ServiceError) -> None:
        self._severed = error
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(error)
