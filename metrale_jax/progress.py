# SPDX-License-Identifier: Apache-2.0
"""Progress of long work on a terminal."""

import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


class TerminalProgress:
    """One bar a stage on stderr: download and load in bytes, compile in programs, generate in tokens."""

    BYTES = ("download", "load")

    def __init__(self):
        self._stage = ""
        self._bar = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of `stage` to `done` of `total`; a new stage closes the last one."""
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            unit = "B" if stage in self.BYTES else "program" if stage == "compile" else "token"
            self._bar = tqdm(
                desc=stage, total=total, unit=unit, unit_scale=stage in self.BYTES, file=sys.stderr, leave=False
            )
            self._stage = stage
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Takes the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage = None, ""
