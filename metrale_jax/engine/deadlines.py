# SPDX-License-Identifier: Apache-2.0
"""`Deadlines`: which requests have run out of time."""

import heapq
from collections.abc import Iterator

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.request import Request

# Requests that ended before their deadlines are forgotten once there are so many more of them than of others.
FORGOTTEN = 256


class Deadlines:
    """The requests that have one, the next to pass first."""

    def __init__(self):
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Takes in a request whose `deadline` is set."""
        heapq.heappush(self._heap, (request.deadline, request.request_id, request))

    def passed(self, now: float, num_alive: int) -> Iterator[Request]:
        """Requests whose time is up and that have not finished, with an error that says so; of `num_alive` in all."""
        if len(self._heap) > 2 * num_alive + FORGOTTEN:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heapq.heappop(self._heap)
            if not request.finished:
                request.error = RequestError(
                    f"deadline of {request.params.deadline_s} s passed after {len(request.output)} tokens; allow more "
                    "time, or ask for fewer tokens.",
                    "deadline_s",
                )
                yield request
