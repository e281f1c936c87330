# SPDX-License-Identifier: Apache-2.0
"""Progress of long work on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import ClassVar

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def shown_by(progress: bool | Progress) -> Progress:
    """What tells of long work: bars on a terminal, nothing, or what is given."""
    if isinstance(progress, bool):
        return TerminalProgress() if progress else silent
    return progress


@contextmanager
def compiling(progress: Progress, name: str) -> Iterator[None]:
    """A context in which the program called `name` is compiled, as a stage of its own."""
    progress(f"compile {name}", 0, 1)
    try:
        yield
    finally:
        progress(f"compile {name}", 1, 1)


class TerminalProgress:
    """One bar a stage on stderr: download and load in bytes, compile in programs, generate in tokens,
    those of `UNITS` in theirs.

    A program that no load compiled ahead, because its shape is met in a step, has a bar of its own: "compile advance".

    Stages may overlap and report from several threads.
    """

    UNITS: ClassVar = {"download": "B", "load": "B", "answer": "answer", "answer held-out prompts": "answer"}

    def __init__(self):
        self._bars = {}
        self._lock = Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of `stage` to `done` of `total`, and takes it off the terminal when it is full."""
        from tqdm import tqdm

        with self._lock:
            bar = self._bars.get(stage)
            if bar is None:
                unit = self.UNITS.get(stage) or ("program" if stage.startswith("compile") else "token")
                bar = self._bars[stage] = tqdm(
                    desc=stage, total=total, unit=unit, unit_scale=unit == "B", file=sys.stderr, leave=False
                )
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                self._bars.pop(stage).close()
