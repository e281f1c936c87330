# SPDX-License-Identifier: Apache-2.0
"""When a call that failed is made again: `RetryPolicy` says, `Attempts` counts. Nothing here waits or sends."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serving.client.errors import ClientError, ExhaustedError, UnavailableError


@dataclass(frozen=True)
class RetryPolicy:
    """At most `max_attempts` tries of a call. The wait before the second is about `first_wait_s`, before each further
    one `factor` times the last, up to `max_wait_s`; a share of up to `jitter` is left out by chance, so that clients do
    not come back together. Where the server names a time, the wait is that or up to `jitter` more; one that it sets
    beyond `max_wait_s` is not waited for. Raises `ValueError` for what is out of range.
    """

    max_attempts: int = 5
    first_wait_s: float = 0.1
    factor: float = 2.0
    max_wait_s: float = 10.0
    jitter: float = 0.5

    def __post_init__(self):
        for name, low, high in (
            ("max_attempts", 1, math.inf),
            ("first_wait_s", 0, self.max_wait_s),
            ("factor", 1, math.inf),
            ("jitter", 0, 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is not between {low} and {high}; use a value in that range.")


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(max_attempts=1)


@dataclass(frozen=True)
class Clock:
    """Time and chance as a client sees them: seconds that only grow, ways to wait (of threads and of coroutines), and
    numbers from 0 to 1."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    chance: Callable[[], float] = random.random


REAL_CLOCK = Clock()


class Attempts:
    """The tries of one call, which share its `timeout_s` (None or infinite: they have as long as it takes)."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, clock: Clock):
        self._policy, self._clock = policy, clock
        self._failures = 0
        self._ends_at_s = None if timeout_s is None or math.isinf(timeout_s) else clock.now_s() + timeout_s

    def left_s(self) -> float | None:
        """Seconds that the next try has; None without a limit."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._clock.now_s())

    def wait_s(self, error: ClientError, *, delivered: bool = False) -> float:
        """Seconds until the next try after `error`. Raises it where there is none: tries or time are used up, a part
        of the answer is `delivered` already, or the same call would fail again."""
        self._failures += 1
        wait_s = self._wait_s(error)
        left_s = self.left_s()
        if delivered or wait_s is None or (left_s is not None and wait_s >= left_s):
            raise error
        return wait_s

    def _wait_s(self, error: ClientError) -> float | None:
        policy, named_s = self._policy, error.retry_after_s
        # Exhausted without a time is a limit that does not pass: a message that is too large.
        hopeful = isinstance(error, UnavailableError) or (isinstance(error, ExhaustedError) and named_s is not None)
        if not hopeful or self._failures >= policy.max_attempts:
            return None
        chance = policy.jitter * self._clock.chance()
        if named_s is not None:
            return named_s * (1 + chance) if named_s <= policy.max_wait_s else None
        # The exponent is kept where floats hold it.
        grown = policy.first_wait_s * policy.factor ** min(self._failures - 1, 64)
        return min(grown, policy.max_wait_s) * (1 - chance)
