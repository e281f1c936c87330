# SPDX-License-Identifier: Apache-2.0
"""`EngineLink`: the event loop's end of the engine thread. Orders go one way, reports come back to their outboxes."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from serving.core.errors import ServiceError
from serving.core.orders import CancelOrder, Order, Report
from serving.core.outbox import Outbox


class EngineLink:
    """`put` hands an order to the engine thread. All but `deliver` and `sever` are for the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, put: Callable[[Order], None]):
        self._loop, self._put = loop, put
        self._ids = itertools.count(1)
        self._outboxes: dict[int, Outbox] = {}
        self._severed: ServiceError | None = None

    def order(self, make: Callable[[int], Order], outbox: Outbox) -> int:
        """The id of a new job, whose reports come to `outbox`; `make(job_id)` is its order."""
        job_id = next(self._ids)
        if self._severed is not None:
            outbox.fail(self._severed)
            return job_id
        self._outboxes[job_id] = outbox
        self._put(make(job_id))
        return job_id

    def cancel(self, job_id: int) -> None:
        """Ends a job that is not over."""
        if self._outboxes.pop(job_id, None) is not None:
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
            outbox = self._outboxes.get(report.job_id)
            if outbox is None:
                continue  # it was cancelled meanwhile
            if report.last:
                del self._outboxes[report.job_id]
            if isinstance(report.news, ServiceError):
                outbox.fail(report.news)
            else:
                outbox.put(report.news)

    def _fail_all(self, error: ServiceError) -> None:
        self._severed = error
        for outbox in self._outboxes.values():
            outbox.fail(error)
        self._outboxes.clear()
