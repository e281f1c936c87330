# SPDX-License-Identifier: Apache-2.0
"""`WaitingQueue`: who enters next. Its cost does not grow with the number that wait beyond a logarithm."""

import heapq

from metrale_jax.engine.request import Request

# A level of priority is worth this many places in the queue: a late request of high priority passes others, but each
# is passed by a bounded number, so that nobody starves.
PLACES_PER_PRIORITY = 1000


def rank_of(arrival: int, priority: int) -> int:
    """The place of the `arrival`th request in the queue; a lower `priority` is served earlier."""
    return arrival + priority * PLACES_PER_PRIORITY


class WaitingQueue:
    """Requests by rank. One that ended while it waited is passed over when its turn comes."""

    def __init__(self):
        self._heap: list[tuple[int, int, Request]] = []
        self._inside: set[int] = set()

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self):
        return (request for _, key, request in self._heap if key in self._inside and request.request_id == key)

    def push(self, request: Request) -> None:
        """Queues a request; one that comes back takes its old place."""
        self._inside.add(request.request_id)
        heapq.heappush(self._heap, (request.rank, request.request_id, request))

    def head(self) -> Request | None:
        """The next to enter, or None."""
        while self._heap and self._heap[0][1] not in self._inside:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """The head, taken out."""
        request = self.head()
        assert request is not None, "nobody waits"
        heapq.heappop(self._heap)
        self._inside.discard(request.request_id)
        return request

    def discard(self, request: Request) -> None:
        """Forgets a request, whether or not it waits."""
        self._inside.discard(request.request_id)
