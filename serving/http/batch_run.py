# SPDX-License-Identifier: Apache-2.0
"""`BatchRun`: one batch from its first line to its files, on the service that answers live calls."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from serving.batch.done import SeenIds
from serving.batch.files import BatchError
from serving.batch.jsonl import JsonlFile, JsonlSource
from serving.batch.lines import undone_lines
from serving.batch.records import error_record, response_record, spelt
from serving.batch.sink import SplitSink
from serving.batch.window import grouped
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import State
from serving.core.turns import Turns
from serving.http.answers import gathered
from serving.http.batch_check import BatchFault, checked, pieces, without_line
from serving.http.batch_lines import LineCheck, LineJob, endpoints, live_answer
from serving.http.desk import Desk
from serving.http.errors import status_of
from serving.store.owner import Owner
from serving.store.records import BATCH_OUTPUT, StoredBatch, StoredFile
from serving.store.store import Store

LOG = logging.getLogger(__name__)

# Lines that are sorted at a time, so that neighbours share prefixes.
WINDOW, WINDOW_BYTES = 256, 4 << 20
# How often a line that takes longer than a call may is begun again.
MAX_LATE = 3
# Seconds between two looks for the model, and between two times at which the output is made safe.
LOOK_S, SYNC_S = 0.25, 5.0
# Why a batch fails, beside what is wrong with its file and the disk.
CODES = {Kind.UNAUTHENTICATED: "key_revoked", Kind.INVALID: "storage_full"}
# What is said of the lines that an end leaves without an answer.
LEFT_OVER = {
    "expired": ("batch_expired", "the batch's completion window ended before this line was answered; ask again."),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered; ask again."),
}


@dataclass(frozen=True)
class BatchDesk:
    """What all batches share. `room` bounds how many answers they have in flight together, `max_lines` a batch;
    `caller(key_id)` is who holds a key, or raises `ServiceError`."""

    desk: Desk
    store: Store
    room: Turns
    caller: Callable[[str], Caller]
    max_lines: int


class BatchRun:
    """One batch, from wherever it is. `answer` brings it to its last line, `end` to its files and its last status."""

    def __init__(self, shared: BatchDesk, owner: Owner, batch: StoredBatch):
        self._shared, self._owner, self._id = shared, owner, batch.id
        self._store, self._desk = shared.store, shared.desk
        self._endpoint = endpoints(shared.desk)[batch.endpoint]
        self._sink: SplitSink | None = None
        self._taking = asyncio.Lock()
        self._synced_s = time.monotonic()

    @property
    def batch(self) -> StoredBatch:
        """How it stands."""
        return self._owner.batches[self._id]

    async def answer(self, num_workers: Callable[[], int]) -> None:
        """Answers what is still to be answered. Raises `BatchFault`; cancelled, it can be called again some day."""
        try:
            if self.batch.status == "validating":
                await self._validate()
            await self._model_there()
            await self._open()
            jobs = await self._on_disk(self._jobs)
            try:
                await gathered([self._work(jobs) for _ in range(num_workers())])
            finally:
                await self._on_disk(jobs.close)
        except BatchError as error:
            LOG.error("batch %s failed: %s", self._id, error)
            raise BatchFault(without_line("storage_failed", _public(error))) from error
        except ServiceError as error:
            raise BatchFault(without_line(CODES.get(error.kind, "server_error"), str(error))) from error

    async def end(self, status: str, *faults: dict[str, Any]) -> None:
        """Gives the lines that are left an error, if the `status` is one at which there are such, and keeps the files.
        What the disk does not take is lost, and the batch ends all the same."""
        if status != "cancelled" and "in_progress" in self.batch.moments:
            await self.move("finalizing")
        with suppress(BatchError, ServiceError):
            if status in LEFT_OVER and "in_progress" in self.batch.moments:
                await self._open()
                await self._give_up(*LEFT_OVER[status])
        found = {}
        if self._sink is not None:
            with suppress(BatchError):
                await self._on_disk(self._sink.sync)
            # A worker that was ended as it wrote has not counted what the disk took all the same.
            self._count()
            await self.close()
            for name, file_id in zip(("output_file_id", "error_file_id"), self.batch.output_ids, strict=True):
                found[name] = await self._kept(file_id, "output" if name == "output_file_id" else "errors")
        await self.move(status, errors=tuple(faults), **found)

    async def close(self) -> None:
        """Lets go of the files; they stay as they are."""
        sink, self._sink = self._sink, None
        if sink is not None:
            await self._on_disk(sink.close)

    async def move(self, status: str, **changes: Any) -> None:
        """The batch has come to this status, whether or not the disk takes note of it."""
        moved = self.batch.at(status, self._store.now, **changes)
        with suppress(ServiceError):
            await self._store.put(self._owner, moved)

    async def _validate(self) -> None:
        served = [card.id for card in self._desk.service.models()]
        content = self._owner.content(self.batch.input_file_id)
        num_lines, model = await checked(self._store, content, self.batch.endpoint, self._shared.max_lines, served)
        await self.move("in_progress", total=num_lines, model=model)

    async def _model_there(self) -> None:
        """Waits until the model that this batch needs serves, whichever that is where nothing was said yet."""
        while True:
            if self._desk.lifecycle.state is State.SERVING:
                served = [card.id for card in self._desk.service.models()]
                if served and not self.batch.model:
                    await self.move(self.batch.status, model=served[0])
                if self.batch.model in served:
                    return
            await asyncio.sleep(LOOK_S)

    async def _open(self) -> None:
        if self._sink is not None:
            return
        paths = [self._owner.content(file_id) for file_id in self.batch.output_ids]
        self._sink = await self._on_disk(lambda: SplitSink(*map(JsonlFile, paths)))
        for file_id, path in zip(self.batch.output_ids, paths, strict=True):
            self._owner.growing[file_id] = path.stat().st_size
        self._count()

    def _jobs(self) -> Iterator[LineJob]:
        """What is left to be answered, in the disk's thread."""
        return grouped(self._checked(self._source()), WINDOW, WINDOW_BYTES)

    def _source(self) -> JsonlSource:
        return JsonlSource(self._owner.content(self.batch.input_file_id))

    def _checked(self, source: JsonlSource) -> Iterator[LineJob]:
        ids = SeenIds()
        try:
            for line in undone_lines(source, self._sink.done, ids, LineCheck(self.batch.endpoint)):
                if line.job is not None:
                    yield line.job
                else:
                    assert line.fault is None, "the file was found in order and cannot change"
                    self._sink.skip(line.number)
        finally:
            ids.close()

    async def _work(self, jobs: Iterator[LineJob]) -> None:
        while True:
            async with self._taking:
                job = await self._on_disk(next, jobs, None)
            if job is None:
                return
            status, body = await self._answered(job)
            record = response_record(job.origin, status, body, self._request_id(job))
            await self._put(job.origin.line, spelt(record), status == 200)
            self._count()
            await self._sync_when_due()

    async def _answered(self, job: LineJob) -> tuple[int, dict[str, Any]]:
        """Status and body of a line's answer, as soon as it can have one."""
        batch, request_id, num_late = self.batch, self._request_id(job), 0
        while True:
            await self._model_there()
            turn = await self._shared.room.take(batch.key_id, batch.created, job.num_answers)
            try:
                caller = self._shared.caller(batch.key_id)
                return await live_answer(self._desk, self._endpoint, job, caller, self.batch.model, request_id)
            except ServiceError as error:
                num_late += error.kind is Kind.TOO_LATE
                if error.kind is Kind.UNAUTHENTICATED:
                    raise
                if num_late > MAX_LATE:
                    return status_of(error), self._endpoint.form.body(error, request_id)
            finally:
                turn.end()
            await asyncio.sleep(LOOK_S)

    def _request_id(self, job: LineJob) -> str:
        return f"{self._id}-{job.origin.line}"

    async def _put(self, line: int, text: bytes, is_answer: bool) -> None:
        self._store.grow(self._owner, self.batch.output_ids[not is_answer], len(text))
        await self._on_disk(self._sink.put, line, text, is_answer)

    def _count(self) -> None:
        """The counts are those of the files, which are told where the batch goes on."""
        counts = self._sink.counts
        self._owner.batches[self._id] = replace(self.batch, completed=counts[True], failed=counts[False])

    async def _sync_when_due(self) -> None:
        if time.monotonic() - self._synced_s >= SYNC_S:
            self._synced_s = time.monotonic()
            await self._on_disk(self._sink.sync)

    async def _give_up(self, code: str, message: str) -> None:
        ids = await self._on_disk(SeenIds)
        try:
            source = await self._on_disk(self._source)
            lines = undone_lines(source, self._sink.done, ids, LineCheck(self.batch.endpoint))
            async for piece in pieces(self._store, lines):
                for line in piece:
                    if line.job is not None:
                        await self._put(line.number, spelt(error_record(line.job.origin, code, message)), False)
        finally:
            self._count()
            await self._on_disk(ids.close)

    async def _kept(self, file_id: str, what: str) -> str | None:
        """The id, where there is anything in the file; else it is gone."""
        path, now = self._owner.content(file_id), self._store.now
        num_bytes = path.stat().st_size
        if num_bytes:
            made = StoredFile(
                file_id, f"{self._id}_{what}.jsonl", BATCH_OUTPUT, num_bytes, now, now + self.batch.keep_s
            )
            with suppress(ServiceError):
                await self._store.put(self._owner, made)
        else:
            await self._on_disk(partial(path.unlink, missing_ok=True))
        self._owner.growing.pop(file_id, None)
        return file_id if num_bytes else None

    async def _on_disk(self, work: Callable, *arguments: Any) -> Any:
        return await self._store.on_disk(work, *arguments)


def _public(error: BatchError) -> str:
    """The reason without the places on the server's disk."""
    reason = getattr(error.__cause__, "strerror", None) or "its data cannot be used"
    return (
        f"the server could not write the batch's files ({reason}); what was answered is kept, ask again for the rest."
    )
