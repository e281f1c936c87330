# SPDX-License-Identifier: Apache-2.0
"""`run_batch`: the loop that keeps a backend fed from an input and writes what it answers."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_jax.core.errors import MetraleError
from serving.batch.backend import Backend, Ticket
from serving.batch.done import SeenIds
from serving.batch.formats import Source
from serving.batch.lines import undone_lines
from serving.batch.records import Origin, Told, error_record, spelt
from serving.batch.requests import Job, job_of
from serving.batch.signals import StopWish
from serving.batch.sink import DirectSink, HeldSink
from serving.batch.window import grouped


@dataclass(frozen=True)
class Settings:
    """How a batch runs. `defaults` are sampling parameters for lines that do not say; `told` is what answers say.

    `window` lines or `window_bytes` of input are sorted at a time, the bound on what is held of the input. No line is
    taken up that lies more than `max_windows` of them beyond the first unfinished one. Every `sync_s` seconds the
    output is made safe against a power failure.
    """

    defaults: Mapping[str, Any]
    told: Told
    window: int = 4096
    window_bytes: int = 32 << 20
    max_windows: int = 4
    sync_s: float = 5.0


@dataclass
class Tally:
    """What one run did: lines answered and refused, tokens drawn, and whether the batch is complete."""

    answered: int = 0
    refused: int = 0
    tokens: int = 0
    complete: bool = False


def run_batch(
    source: Source,
    sink: DirectSink | HeldSink,
    backend: Backend,
    settings: Settings,
    stop: StopWish,
    progress: Callable[[int, int], None],
) -> Tally:
    """Answers every line that `sink` lacks, until done or told to stop; returns what was done.

    `progress(lines, tokens)` is called for each line. Raises `BatchError` if input or output fail. The sink is left
    open.
    """
    ids = SeenIds()
    try:
        return _Run(source, sink, backend, settings, stop, progress, ids).until_done()
    finally:
        ids.close()


class _Run:
    def __init__(self, source, sink, backend, settings, stop, progress, ids):
        self._source, self._sink, self._backend, self._settings = source, sink, backend, settings
        self._stop, self._progress, self._ids = stop, progress, ids
        self._tally = Tally()
        self._flying: list[tuple[Job, Ticket]] = []
        self._num_flying = 0
        self._synced_at = time.monotonic()

    def until_done(self) -> Tally:
        jobs = grouped(self._jobs(), self._settings.window, self._settings.window_bytes)
        waiting = self._next(jobs)
        while not self._stop and (waiting or self._flying):
            while waiting and not self._stop and self._has_room(waiting):
                self._submit(waiting)
                waiting = self._next(jobs)
            if self._flying:
                self._backend.step()
                self._land()
            self._sync_when_due()
        self._tally.complete = not (self._stop or waiting or self._flying)
        return self._tally

    def _next(self, jobs: Iterator[Job]) -> Job | None:
        with self._stop.awaiting():
            return next(jobs, None)

    def _has_room(self, job: Job) -> bool:
        if not self._flying:
            return True
        ahead = job.origin.line - self._sink.done.floor
        near = ahead <= self._settings.max_windows * self._settings.window
        return near and self._num_flying + job.params.n <= self._backend.max_in_flight

    def _submit(self, job: Job) -> None:
        try:
            ticket = self._backend.submit(job.prompt, job.params)
        except MetraleError as error:
            self._refuse(job.origin, "invalid_request", str(error))
            return
        self._flying.append((job, ticket))
        self._num_flying += job.params.n

    def _land(self) -> None:
        still = []
        for job, ticket in self._flying:
            if ticket.finished:
                self._num_flying -= job.params.n
                self._answer(job, ticket)
            else:
                still.append((job, ticket))
        self._flying = still

    def _answer(self, job: Job, ticket: Ticket) -> None:
        result = ticket.result()
        failed = next((choice for choice in result.choices if choice.error or choice.finish_reason == "abort"), None)
        if failed:
            self._refuse(
                job.origin, "generation_failed", str(failed.error or "the request was cancelled; run it again.")
            )
            return
        tokens = sum(choice.usage.generated_tokens for choice in result.choices)
        self._tally.answered += 1
        self._tally.tokens += tokens
        self._put(job.origin, job.write(job.origin, result, self._settings.told), tokens)

    def _refuse(self, origin: Origin, code: str, message: str) -> None:
        self._tally.refused += 1
        self._put(origin, error_record(origin, code, message), 0)

    def _put(self, origin: Origin, record: dict[str, Any], tokens: int) -> None:
        self._sink.put(origin.line, spelt(record))
        self._progress(1, tokens)

    def _jobs(self) -> Iterator[Job]:
        for line in undone_lines(self._source, self._sink.done, self._ids, self._job):
            if line.fault is not None:
                self._refuse(line.fault.origin, line.fault.code, str(line.fault))
            elif line.job is None:
                self._sink.skip(line.number)
                self._progress(1, 0)
            else:
                yield line.job

    def _job(self, origin: Origin, record: Mapping[str, Any], num_bytes: int) -> Job:
        return job_of(origin, record, self._settings.defaults, num_bytes)

    def _sync_when_due(self) -> None:
        now = time.monotonic()
        if now - self._synced_at >= self._settings.sync_s:
            self._sink.sync()
            self._synced_at = now
