# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM as a wish to stop, seen between steps, or at once while input is awaited."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopWish:
    """Whether and by which signal a stop was asked for; truthy if so. A second signal interrupts whatever runs."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._awaiting = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listens for the signals, in the main thread, and puts back who listened before."""
        before = {number: signal.signal(number, self._on_signal) for number in WATCHED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """A stretch that may wait for others and that a signal ends with `KeyboardInterrupt`."""
        self._awaiting = True
        try:
            yield
        finally:
            self._awaiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = bool(self), signal.Signals(number)
        if again or self._awaiting:
            raise KeyboardInterrupt
