# SPDX-License-Identifier: Apache-2.0
"""Jobs in an order that lets neighbours share prefixes, a bounded window at a time."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar


class Sortable(Protocol):
    """A job of `num_bytes` of input; `sort_key`s compare as prompts begin."""

    num_bytes: int

    @property
    def sort_key(self) -> Any:
        """What it is sorted by."""


Job = TypeVar("Job", bound=Sortable)


def grouped(jobs: Iterable[Job], max_jobs: int, max_bytes: int) -> Iterator[Job]:
    """The same jobs, sorted by prompt within windows of at most `max_jobs` or about `max_bytes` of input lines.

    In that order a prompt's neighbour has the longest prefix in common with it that any in the window has, so what the
    first of them computed is still cached when the next comes.
    """
    window: list[Job] = []
    size = 0
    for job in jobs:
        window.append(job)
        size += job.num_bytes
        if len(window) >= max_jobs or size >= max_bytes:
            yield from _in_order(window)
            size = 0
    yield from _in_order(window)


def _in_order(window: list[Job]) -> Iterator[Job]:
    window.sort(key=lambda job: job.sort_key, reverse=True)
    while window:
        yield window.pop()
