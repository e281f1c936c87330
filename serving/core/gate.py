# SPDX-License-Identifier: Apache-2.0
"""`Gate`: bounds the queue before the engine, and turns away at once what would only time out in it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NoReturn

from serving.core.errors import Kind, ServiceError

# Seconds over which the rate of starting is taken: older ones count for less.
RECENT_S = 20.0
# A rate is believed after so many starts, while it rests on as many recent ones or on so many seconds of waiting.
MIN_STARTS = 4
MIN_BUSY_S = 1.0
# Where nothing is known, and the bounds of what is.
FIRST_GUESS_S, MIN_RETRY_S, MAX_RETRY_S = 1.0, 0.1, 300.0


class Place:
    """A place in the queue, given up once: by `started` or by `left`."""

    def __init__(self, give_up: Callable[[bool], None]):
        self._give_up: Callable[[bool], None] | None = give_up

    def started(self) -> None:
        """Nothing; the prompt begins to run."""
        self._leave(True)

    def left(self) -> None:
        """Nothing; the call goes, whatever became of it. After `started` it changes nothing."""
        self._leave(False)

    def _leave(self, started: bool) -> None:
        give_up, self._give_up = self._give_up, None
        if give_up is not None:
            give_up(started)


@dataclass(eq=False)
class Gate:
    """A queue of at most `max_waiting_requests` prompts of `max_waiting_tokens` together; 0 is no limit. A prompt
    longer than that may wait alone. `clock` gives seconds that only grow. Any thread may ask.

    Rates are of prompts that began to run over the time in which somebody waited: an idle server tells nothing of how
    much it could start. A server that stands still has a rate that falls; what was measured long ago is forgotten.
    """

    max_waiting_requests: int
    max_waiting_tokens: int
    clock: Callable[[], float]
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_shed: int = 0
    _requests: float = field(default=0.0, repr=False)
    _tokens: float = field(default=0.0, repr=False)
    _busy_s: float = field(default=0.0, repr=False)
    _num_starts: int = field(default=0, repr=False)
    _measured_s: float = field(default=0.0, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def enter(self, num_tokens: int, timeout_s: float | None) -> Place:
        """A place for a prompt of `num_tokens` that waits `timeout_s` at most, None for as long as it takes. Raises
        `ServiceError` (EXHAUSTED) where the queue is full or too slow for it."""
        with self._lock:
            self._measure()
            self._refuse_if_full(num_tokens)
            wait_s = self._wait_s(num_tokens)
            if timeout_s is not None and wait_s > timeout_s:
                about = f"the queue takes about {wait_s:.3g} s at present, and the call waits {timeout_s:.3g} s"
                self._shed(about, wait_s - timeout_s)
            self.num_waiting += 1
            self.num_waiting_tokens += num_tokens
        return Place(lambda started: self._leave(num_tokens, started))

    def _refuse_if_full(self, num_tokens: int) -> None:
        if self.max_waiting_requests and self.num_waiting >= self.max_waiting_requests:
            about = f"{self.num_waiting} requests wait, and the limit is {self.max_waiting_requests}"
            self._shed(about, self._time_of(1, self._requests))
        excess = self.num_waiting_tokens + num_tokens - self.max_waiting_tokens
        if self.max_waiting_tokens and self.num_waiting and excess > 0:
            about = f"prompts of {self.num_waiting_tokens} tokens wait, and the limit is {self.max_waiting_tokens}"
            self._shed(about, self._time_of(min(excess, self.num_waiting_tokens), self._tokens))

    def _wait_s(self, num_tokens: int) -> float:
        """Until those that wait and one of `num_tokens` have begun, by requests or by tokens, whichever promises more;
        0 where none waits, so that somebody always gets to measure."""
        if not self.num_waiting or not self._known:
            return 0.0
        of_requests = self._time_of(self.num_waiting + 1, self._requests)
        return min(of_requests, self._time_of(self.num_waiting_tokens + num_tokens, self._tokens))

    @property
    def _known(self) -> bool:
        return self._num_starts >= MIN_STARTS and (self._requests >= MIN_STARTS or self._busy_s >= MIN_BUSY_S)

    def _time_of(self, amount: float, started: float) -> float:
        if not self._known:
            return FIRST_GUESS_S
        return amount * self._busy_s / started if started else math.inf

    def _shed(self, about: str, retry_after_s: float) -> NoReturn:
        self.num_shed += 1
        retry_after_s = min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
        raise ServiceError(
            Kind.EXHAUSTED, f"{about}; come again in {retry_after_s:.3g} s.", retry_after_s=retry_after_s
        )

    def _measure(self) -> None:
        """Lets what was measured fade by the time since, which is added where somebody waited."""
        now_s = self.clock()
        passed_s, self._measured_s = now_s - self._measured_s, now_s
        keep = math.exp(-passed_s / RECENT_S)
        self._requests, self._tokens, self._busy_s = self._requests * keep, self._tokens * keep, self._busy_s * keep
        if self.num_waiting:
            self._busy_s += passed_s

    def _leave(self, num_tokens: int, started: bool) -> None:
        with self._lock:
            self._measure()
            self.num_waiting -= 1
            self.num_waiting_tokens -= num_tokens
            if started:
                self._num_starts += 1
                self._requests += 1
                self._tokens += num_tokens
