# SPDX-License-Identifier: Apache-2.0
"""`BatchWork`: all batches under way, taken up at the start of the server and left in order at its end."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from serving.core.calls import Caller
from serving.core.errors import ServiceError
from serving.core.incidents import foreseen
from serving.core.turns import Turns
from serving.http.batch_check import BatchFault, without_line
from serving.http.batch_lines import METHOD
from serving.http.batch_run import BatchDesk, BatchRun
from serving.http.desk import Desk
from serving.store.owner import Owner
from serving.store.records import StoredBatch
from serving.store.store import Store

LOG = logging.getLogger(__name__)

SWEEP_S = 60.0
# A batch in whose midst the server ended so often may well be why: it is not taken up again.
MAX_BEGUN = 10


class BatchWork:
    """Answers batches of `store` on the desk's service, up to `in_flight` answers at a time (0: half of what the model
    runs at a time). `caller(key_id)` is who holds a key."""

    def __init__(
        self, desk: Desk, store: Store, caller: Callable[[str], Caller], in_flight: int = 0, max_lines: int = 100_000
    ):
        self._desk, self.store, self._in_flight = desk, store, in_flight
        self._shared = BatchDesk(desk, store, Turns(self._room), caller, max_lines)
        self._runs: dict[str, asyncio.Task] = {}
        self._sweeping: asyncio.Task | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Goes on with what was under way."""
        for owner in self.store.owners:
            for batch in owner.unfinished:
                owner.batches[batch.id] = replace(batch, num_begun=batch.num_begun + 1)
                self.begin(owner, batch)
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Leaves all batches where they are, to be taken up at the next start."""
        if self._is_stopping:
            return
        self._is_stopping = True
        tasks = [*self._runs.values(), *([self._sweeping] if self._sweeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for owner in self.store.owners:
            for batch in owner.unfinished:
                with suppress(ServiceError):
                    await self.store.put(owner, replace(batch, num_begun=batch.num_begun - 1))

    def begin(self, owner: Owner, batch: StoredBatch) -> None:
        """Works on it from now on, or from the next start on where this one has ended."""
        if self._is_stopping:
            return
        task = asyncio.create_task(self._run(owner, batch))
        self._runs[batch.id] = task
        task.add_done_callback(lambda _: self._ended(owner, batch))

    async def cancel(self, owner: Owner, batch: StoredBatch) -> StoredBatch:
        """The batch, which ends soon; what was answered of it is kept."""
        if batch.status in ("validating", "in_progress"):
            if batch.id in self._runs:
                self._runs[batch.id].cancel()
            # It is known at once, so that nobody cancels it twice.
            with suppress(ServiceError):
                await self.store.put(owner, batch.at("cancelling", self.store.now))
        return owner.batches[batch.id]

    def _ended(self, owner: Owner, batch: StoredBatch) -> None:
        del self._runs[batch.id]
        if owner.batches.get(batch.id, batch).status == "cancelling":
            # Its work was broken off, wherever that was; what is left is to end it.
            self.begin(owner, batch)

    def _room(self) -> int:
        models = self._desk.service.models()
        return self._in_flight or max(1, sum(card.max_sequences for card in models) // 2)

    async def _run(self, owner: Owner, batch: StoredBatch) -> None:
        run = BatchRun(self._shared, owner, batch)
        try:
            with foreseen(METHOD):
                await run.end(*await self._outcome(run))
        except ServiceError as error:
            await run.move("failed", errors=(without_line("server_error", str(error)),))
        finally:
            await run.close()

    async def _outcome(self, run: BatchRun) -> tuple:
        """The status to end in, and faults."""
        if run.batch.status == "cancelling":
            return ("cancelled",)
        if run.batch.num_begun > MAX_BEGUN:
            message = f"the server ended {MAX_BEGUN} times in the midst of this batch, which may be why; ask for less."
            return ("failed", without_line("server_ended", message))
        if run.batch.expires <= self.store.now:
            return ("expired",)
        # The disk knows of it before anything is tried.
        await run.move(run.batch.status)
        try:
            async with asyncio.timeout(run.batch.expires - self.store.now) as window:
                await run.answer(self._room)
        except TimeoutError:
            if not window.expired():
                raise
            return ("expired",)
        except BatchFault as error:
            return ("failed", *error.faults)
        return ("completed",)

    async def _sweep(self) -> None:
        while True:
            await self.store.sweep()
            await asyncio.sleep(SWEEP_S)
