# SPDX-License-Identifier: Apache-2.0
"""`Meter`: holds each key to its limits by token buckets that a minute fills."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NoReturn

from serving.core.errors import Kind, ServiceError
from serving.core.keys import KeyLimits

MINUTE_S = 60.0
# Of a bucket: what adding up times in floating point can lack.
ROUNDING = 1e-6
# Admissions between two looks for accounts that say no more than a fresh one would.
SWEEP_EVERY = 1024
# Where nothing was measured of how long a key's calls take.
FIRST_GUESS_S = 1.0
# Weight of the newest call in the mean time of a key's calls.
NEWEST = 0.2


@dataclass
class _Bucket:
    """`level` of `per_minute`, as it stood at `at_s`; below zero where more was taken than there was."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, per_minute: int, now_s: float) -> None:
        self.level = min(self.level + (now_s - self.at_s) * self.per_minute / MINUTE_S, per_minute)
        if per_minute and not self.per_minute:
            self.level = per_minute  # there was no limit until now
        self.per_minute, self.at_s = per_minute, now_s

    def wait_s(self, amount: float) -> float:
        """Until `amount` can be taken; more than it holds may be taken from a full one."""
        lack = min(amount, self.per_minute) - self.level
        if not self.per_minute or lack <= ROUNDING * self.per_minute:
            return 0.0
        return lack * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        if self.per_minute:
            self.level -= amount

    def is_full(self, now_s: float) -> bool:
        return self.wait_s(self.per_minute) <= now_s - self.at_s


@dataclass
class _Account:
    requests: _Bucket
    tokens: _Bucket
    num_open: int = 0
    mean_s: float = FIRST_GUESS_S


class Permit:
    """A call that was let in. It is open until `close`."""

    def __init__(self, close: Callable[[int], None]):
        self._close: Callable[[int], None] | None = close

    def close(self, num_generated: int = 0) -> None:
        """Nothing; charges what was generated, the first time it is called."""
        close, self._close = self._close, None
        if close is not None:
            close(num_generated)


@dataclass(eq=False)
class Meter:
    """Counts what each key does; `clock` gives seconds that only grow. Any thread may ask.

    A key's buckets hold what a minute gives, so that a minute's worth may come at once. A call takes one request and
    its prompt's tokens as it comes, and its answer's tokens as it ends: what lacks then, later calls wait for. A call
    larger than the whole bucket waits until that is full. What is refused takes nothing.
    """

    limits_of: Callable[[str], KeyLimits]
    clock: Callable[[], float]
    num_refused: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)
    _num_asked: int = 0

    @property
    def num_open(self) -> int:
        """Calls that were let in and have not ended."""
        with self._lock:
            return sum(account.num_open for account in self._accounts.values())

    def admit(self, key_id: str, num_tokens: int) -> Permit:
        """Leave for a call of `num_tokens` in its prompt. Raises `ServiceError`: EXHAUSTED, with the seconds until the
        call could be let in if no other came; or what `limits_of` raises."""
        limits = self.limits_of(key_id)
        with self._lock:
            now_s = self.clock()
            account = self._account(key_id, limits, now_s)
            if limits.max_concurrent and account.num_open >= limits.max_concurrent:
                about = f"{account.num_open} calls of this key are open, and its limit is {limits.max_concurrent}"
                self._refuse(about, account.mean_s / limits.max_concurrent)
            for bucket, amount, what in ((account.requests, 1, "requests"), (account.tokens, num_tokens, "tokens")):
                wait_s = bucket.wait_s(amount)
                if wait_s:
                    self._refuse(f"this key's limit of {bucket.per_minute} {what} a minute is used up", wait_s)
            account.requests.take(1)
            account.tokens.take(num_tokens)
            account.num_open += 1
        return Permit(lambda num_generated: self._close(account, now_s, num_generated))

    def _refuse(self, about: str, retry_after_s: float) -> NoReturn:
        self.num_refused += 1
        raise ServiceError(
            Kind.EXHAUSTED, f"{about}; come again in {retry_after_s:.3g} s.", retry_after_s=retry_after_s
        )

    def _account(self, key_id: str, limits: KeyLimits, now_s: float) -> _Account:
        self._num_asked += 1
        if self._num_asked % SWEEP_EVERY == 0:
            self._sweep(now_s)
        account = self._accounts.get(key_id)
        if account is None:
            of_requests, of_tokens = limits.requests_per_minute, limits.tokens_per_minute
            account = _Account(_Bucket(of_requests, of_requests, now_s), _Bucket(of_tokens, of_tokens, now_s))
            self._accounts[key_id] = account
        account.requests.fill(limits.requests_per_minute, now_s)
        account.tokens.fill(limits.tokens_per_minute, now_s)
        return account

    def _sweep(self, now_s: float) -> None:
        idle = [
            key_id
            for key_id, account in self._accounts.items()
            if not account.num_open and account.requests.is_full(now_s) and account.tokens.is_full(now_s)
        ]
        for key_id in idle:
            del self._accounts[key_id]

    def _close(self, account: _Account, admitted_s: float, num_generated: int) -> None:
        with self._lock:
            account.num_open -= 1
            account.tokens.take(num_generated)
            account.mean_s += NEWEST * (self.clock() - admitted_s - account.mean_s)
