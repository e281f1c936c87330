# SPDX-License-Identifier: Apache-2.0
"""`ModelChanges`: how another model comes in the place of the one that serves. On the event loop.

A change is a task of the server: whoever asked for it may go. There is one at a time, until the model before is gone.
"""

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial

from serving.core.calls import Caller
from serving.core.catalog import Wanted
from serving.core.changes import Change, ChangeStatus
from serving.core.errors import Kind, ServiceError
from serving.core.hosted_model import HostedModel, no_room
from serving.core.hosting import Hosting, ending
from serving.core.lifecycle import State
from serving.core.parts import Parts
from serving.core.records import ChangeRecord

LOG = logging.getLogger(__name__)
# Between two looks at whether calls have ended, and at whether a thread has.
LOOK_EVERY_S, JOIN_S = 0.02, 0.5
# What who asked about a model may take to call it.
ASKED_S = 2.0


class ModelChanges:
    """`start` begins to load the first model of `hosting`. A load that somebody asked for is given up after
    `load_after_s` (0: never)."""

    def __init__(self, hosting: Hosting, parts: Parts, load_after_s: float):
        self._hosting, self._parts, self._load_after_s = hosting, parts, load_after_s
        self._lifecycle = parts.lifecycle
        self.now: Change | None = None
        self.last: ChangeStatus | None = None
        self.last_wanted = hosting.newest.wanted
        self._task: asyncio.Task | None = None

    def start(self) -> None:
        """Begins to load the first model."""
        first = self._hosting.newest
        change = _begun("load", first.name, Caller())
        first.start()
        self._begin(change, self._started(change, first))

    def load(self, wanted: Wanted, drain_first: bool | None, grace_s: float | None, caller: Caller) -> Change:
        """The change that brings a model. Raises `ServiceError`: CONFLICT, or UNAVAILABLE at the server's end."""
        self._refuse_another()
        change = _begun("load", wanted.name, caller)
        self._begin(change, self._swapped(change, wanted, drain_first, grace_s))
        return change

    def unload(self, grace_s: float | None, caller: Caller) -> Change:
        """The change that takes the model away. Raises as `load`; CONFLICT also where there is none."""
        self._refuse_another()
        if self._hosting.current is None:
            raise ServiceError(Kind.CONFLICT, "no model is loaded that could be unloaded; load one.")
        change = _begun("unload", self._hosting.current.name, caller)
        self._begin(change, self._unloaded(change, grace_s))
        return change

    async def give_up(self) -> None:
        """Ends a change that is under way, for the server ends. Calls of all models go on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _started(self, change: Change, first: HostedModel) -> None:
        await self._brought(change, first, 0.0)
        self._install(first)
        change.succeed()

    async def _swapped(self, change: Change, wanted: Wanted, drain_first: bool | None, grace_s: float | None) -> None:
        old = self._hosting.current
        if old is None:
            await self._into_nothing(change, wanted)
        elif drain_first:
            await self._in_place(change, wanted, old, grace_s)
        elif not self._parts.room_for_two():
            if drain_first is not None:
                raise no_room(wanted.name)
            await self._in_place(change, wanted, old, grace_s)
        else:
            await self._beside(change, wanted, old, drain_first is None, grace_s)

    async def _into_nothing(self, change: Change, wanted: Wanted) -> None:
        self._lifecycle.move(State.LOADING, f"{wanted.name!r} is loaded")
        try:
            await self._load_and_install(change, wanted)
        except ServiceError as error:
            self._lifecycle.move(State.UNLOADED, f"{wanted.name!r} could not be loaded: {error}")
            raise

    async def _beside(
        self, change: Change, wanted: Wanted, old: HostedModel, may_drain: bool, grace_s: float | None
    ) -> None:
        coming = self._hosting.made(wanted)
        coming.start()
        try:
            await self._brought(change, coming, self._load_after_s)
            self._install(coming)
        except ServiceError:
            if coming.lacks_room and may_drain:
                await self._in_place(change, wanted, old, grace_s)
                return
            raise
        change.succeed()
        self._tell(change)
        change.step = "retiring"
        await self._retire(change, old, grace_s)

    async def _in_place(self, change: Change, wanted: Wanted, old: HostedModel, grace_s: float | None) -> None:
        await self._emptied(change, State.LOADING, f"{wanted.name!r} is loaded in the place of {old.name!r}", grace_s)
        try:
            await self._load_and_install(change, wanted)
        except ServiceError as error:
            change.error = str(error)
            self._lifecycle.move(State.LOADING, f"{old.name!r} is loaded again")
            try:
                await self._load_and_install(change, old.wanted, "restoring")
            except ServiceError as worse:
                # Another start brings back what the operator chose, without anybody's help.
                self._lifecycle.move(State.FAILED, f"{old.name!r} could not be loaded again: {worse}")
            raise error

    async def _unloaded(self, change: Change, grace_s: float | None) -> None:
        await self._emptied(change, State.UNLOADED, f"{change.model!r} was unloaded", grace_s)
        change.succeed()

    # Their parts.

    async def _load_and_install(self, change: Change, wanted: Wanted, step: str = "loading") -> None:
        coming = self._hosting.made(wanted)
        coming.start()
        await self._brought(change, coming, self._load_after_s, step)
        self._install(coming)
        if step == "loading":
            change.succeed()

    async def _brought(self, change: Change, coming: HostedModel, limit_s: float, step: str = "loading") -> None:
        """Returns when it can answer. Raises `ServiceError` when it cannot, and nothing is left of it."""
        change.step, change.progress = step, coming.progress
        try:
            async with asyncio.timeout(limit_s or None):
                await asyncio.shield(coming.ready)
        except (TimeoutError, ServiceError) as error:
            await coming.stop(JOIN_S)
            await self._freed(coming)
            if isinstance(error, ServiceError):
                raise
            about = f"{coming.name!r} was not there after {limit_s:g} s, which is load_after_s"
            raise ServiceError(Kind.INTERNAL, f"{about}; see the server's log, or allow more.") from None
        except asyncio.CancelledError:
            coming.close()
            raise

    def _install(self, coming: HostedModel) -> None:
        self._hosting.install(coming)
        self.last_wanted = coming.wanted
        self._parts.figures.follow(coming.stats)

    async def _emptied(self, change: Change, state: State, reason: str, grace_s: float | None) -> None:
        """Returns when no model is there."""
        change.step = "draining"
        old = self._hosting.take_away(state, reason)
        await self._retire(change, old, grace_s)
        if old.engine.alive:
            # It hangs, and holds its memory and perhaps the device: another start may cure that.
            self._lifecycle.move(State.FAILED, old.death)
            raise ServiceError(Kind.INTERNAL, f"the engine of {old.name!r} does not end: {old.death}.")

    async def _retire(self, change: Change, old: HostedModel, grace_s: float | None) -> None:
        """Returns when its calls have ended, or were ended after `grace_s`, and its memory is free."""
        until = None if grace_s is None else self._parts.clock() + grace_s
        calls_ended = 0
        patience = self._parts.clock() + ASKED_S
        while (old.busy or (old.askers and self._parts.clock() < patience)) and not old.death:
            change.before_calls = len(old.desk.visits)
            if until is not None and self._parts.clock() >= until:
                about = f"the model {old.name!r} is taken away"
                calls_ended += old.end_calls(ServiceError(Kind.UNAVAILABLE, f"{about}; ask again.", retry_after_s=1.0))
            await asyncio.sleep(LOOK_EVERY_S)
        change.before_calls = 0
        while not await old.stop(JOIN_S) and not old.death:
            pass
        freed = await self._freed(old)
        self._parts.changed(ChangeRecord("retire", old.name, calls_ended=calls_ended, freed=freed))

    async def _freed(self, gone: HostedModel) -> bool:
        if gone.llm is not None:
            self._parts.figures.forget(gone.stats)
        return await gone.free()

    # How a change runs.

    def _refuse_another(self) -> None:
        if self._lifecycle.ends:
            self._lifecycle.refuse_unless_serving()
        if self.now is not None:
            about = f"a {self.now.action} of {self.now.model!r} is under way ({self.now.step})"
            raise ServiceError(Kind.CONFLICT, f"{about}; ask for the status, and come again when it has ended.")

    def _begin(self, change: Change, steps: Coroutine) -> None:
        self.now = change
        self._task = asyncio.create_task(steps)
        self._task.add_done_callback(partial(self._ended, change))

    def _ended(self, change: Change, task: asyncio.Task) -> None:
        error = ending() if task.cancelled() else task.exception()
        if isinstance(error, ServiceError):
            error.recorded = True
            change.fail(error)
        elif error is not None:
            LOG.error("a change of models failed", exc_info=error)
            change.fail(ServiceError(Kind.INTERNAL, "the change failed for a reason of the server's own; see its log."))
        self._tell(change)
        change.step = "ended"
        self.last, self.now = change.status(), None

    def _tell(self, change: Change) -> None:
        """Leaves the record of its outcome, once."""
        if not change.told:
            change.told = True
            who = change.key_id, change.peer
            self._parts.changed(
                ChangeRecord(change.action, change.model, *who, change.outcome, change.error, change.seconds)
            )


def _begun(action: str, model: str, caller: Caller) -> Change:
    return Change(action, model, caller.key_id, caller.peer, asyncio.get_running_loop().create_future())
