# SPDX-License-Identifier: Apache-2.0
"""`Pulse`: what the engine thread is at and since when; and `Watchdog`, which tells when it is at it for too long."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Beat:
    """`phase` since the moment `since` of a monotonic clock."""

    phase: str
    since: float


class Pulse:
    """Written by one thread, read by any: a beat is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.last = Beat("starting", clock())

    def enter(self, phase: str) -> str:
        """The phase that ends now; `phase` begins."""
        before = self.last.phase
        self.last = Beat(phase, self._clock())
        return before

    @property
    def held_s(self) -> float:
        """Seconds in the present phase."""
        return self._clock() - self.last.since


class Watchdog:
    """A thread that calls `bark(reason)` once if `pulse` stays in a phase longer than `limits[phase]` seconds; phases
    without a limit may last."""

    def __init__(self, pulse: Pulse, limits: dict[str, float], bark: Callable[[str], None], look_every_s: float = 0.5):
        self._pulse, self._limits, self._bark, self._look_every_s = pulse, limits, bark, look_every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; returns when it has ended, unless it is the one that calls."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            beat, held_s = self._pulse.last, self._pulse.held_s
            limit = self._limits.get(beat.phase)
            if limit is not None and held_s > limit:
                self._bark(f"the engine has been in {beat.phase} for {held_s:.0f} s, more than the {limit:g} s allowed")
                return
