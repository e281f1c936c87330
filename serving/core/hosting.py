# SPDX-License-Identifier: Apache-2.0
"""`Hosting`: which model serves, and how another comes in its place. On the event loop.

Of models that are in memory one is `current`; one may be on its way, and one may be leaving whose calls have yet to
end. A change is a task of the server: whoever asked for it may go. There is one at a time, until the model before is
gone.
"""

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from threading import Lock

from serving.core.calls import Caller
from serving.core.catalog import Wanted
from serving.core.changes import Change, ChangeStatus
from serving.core.errors import Kind, ServiceError
from serving.core.events import ModelCard
from serving.core.hosted_model import HostedModel, Housing
from serving.core.lifecycle import State
from serving.core.records import ChangeRecord

LOG = logging.getLogger(__name__)
# Where a thread cannot be waited for: it loads, or hangs.
NO_WAIT_S = 0.2
# Between two looks at whether calls have ended, and at whether a thread has.
LOOK_EVERY_S, JOIN_S = 0.02, 0.5


class Hosting:
    """`start` begins to load `first`; where that fails the server has FAILED. A load that somebody asked for is given
    up after `load_after_s` (0: never)."""

    def __init__(self, first: Wanted, housing: Housing, load_after_s: float):
        self._housing, self._parts, self._load_after_s = housing, housing.parts, load_after_s
        self._lifecycle = housing.parts.lifecycle
        # Held for as long as it takes to say which model serves: engine threads tell at any time that they are dead.
        self._lock = Lock()
        self.current: HostedModel | None = None
        self.change: Change | None = None
        self.last_change: ChangeStatus | None = None
        self.last_wanted = first
        self._task: asyncio.Task | None = None
        self._hosted: list[HostedModel] = []
        self._newest = self._made(first)
        self._first: HostedModel | None = self._newest

    def start(self) -> None:
        """Begins to load the first model."""
        change = self._begun("load", self.last_wanted.name, Caller())
        self._newest.start()
        self._begin(change, self._started(change))

    @property
    def card(self) -> ModelCard | None:
        """The card of the model that serves."""
        return None if self.current is None else self.current.card

    @property
    def num_calls(self) -> int:
        """Calls under way, those of a model that leaves included."""
        return sum(len(one.desk.visits) for one in self._hosted)

    def front(self) -> HostedModel:
        """The model that a call which comes now goes to; the last one there was, where none serves."""
        return self.current or self._newest

    def load(self, wanted: Wanted, drain_first: bool | None, grace_s: float | None, caller: Caller) -> Change:
        """The change that brings a model. Raises `ServiceError`: CONFLICT, or UNAVAILABLE at the server's end."""
        self._refuse_another()
        change = self._begun("load", wanted.name, caller)
        self._begin(change, self._swapped(change, wanted, drain_first, grace_s))
        return change

    def unload(self, grace_s: float | None, caller: Caller) -> Change:
        """The change that takes the model away. Raises as `load`; CONFLICT also where there is none."""
        self._refuse_another()
        if self.current is None:
            raise ServiceError(Kind.CONFLICT, "no model is loaded that could be unloaded; load one.")
        change = self._begun("unload", self.current.name, caller)
        self._begin(change, self._unloaded(change, grace_s))
        return change

    def give_up(self) -> None:
        """Ends a change that is under way, for the server ends. Calls of all models go on."""
        if self._task is not None:
            self._task.cancel()

    def end_calls(self, error: ServiceError) -> int:
        """How many calls were under way and are ended by `error`."""
        return sum(one.end_calls(error) for one in self._hosted)

    async def stop(self, timeout_s: float) -> bool:
        """Ends all engine threads; whether they did in time."""
        self.give_up()
        waits = [timeout_s if one.ready.done() else min(timeout_s, NO_WAIT_S) for one in self._hosted]
        stopped = await asyncio.gather(*[one.stop(wait) for one, wait in zip(self._hosted, waits, strict=True)])
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        return all(stopped)

    # Changes.

    async def _started(self, change: Change) -> None:
        await self._brought(change, self._newest, 0.0)
        self._install(self._newest)
        self._first = None
        change.succeed()

    async def _swapped(self, change: Change, wanted: Wanted, drain_first: bool | None, grace_s: float | None) -> None:
        old = self.current
        if old is None:
            await self._into_nothing(change, wanted)
        elif drain_first:
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
        coming = self._made(wanted)
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
        change.step = "draining"
        self._take_away(State.LOADING, f"{wanted.name!r} is loaded in the place of {old.name!r}")
        await self._retire(change, old, grace_s)
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
        old = self.current
        change.step = "draining"
        self._take_away(State.UNLOADED, f"{old.name!r} was unloaded")
        await self._retire(change, old, grace_s)
        change.succeed()

    # Their parts.

    async def _load_and_install(self, change: Change, wanted: Wanted, step: str = "loading") -> None:
        coming = self._made(wanted)
        await self._brought(change, coming, self._load_after_s, step)
        self._install(coming)
        if step == "loading":
            change.succeed()

    async def _brought(self, change: Change, coming: HostedModel, limit_s: float, step: str = "loading") -> None:
        """Returns when it can answer. Raises `ServiceError` when it cannot, and nothing is left of it."""
        change.step, change.progress = step, coming.progress
        if coming is not self._first:
            coming.start()
        try:
            async with asyncio.timeout(limit_s or None):
                await asyncio.shield(coming.ready)
        except (TimeoutError, ServiceError) as error:
            await self._discard(coming)
            if isinstance(error, ServiceError):
                raise
            about = f"{coming.name!r} was not there after {limit_s:g} s, which is load_after_s"
            raise ServiceError(Kind.INTERNAL, f"{about}; see the server's log, or allow more.") from None
        except asyncio.CancelledError:
            coming.close()
            raise

    def _install(self, coming: HostedModel) -> None:
        """Calls that come from now on go to it."""
        with self._lock:
            before, self.current = self.current, coming
            coming.serves = True
            if coming.death or not (self._lifecycle.move(State.SERVING) or self._lifecycle.state is State.SERVING):
                self.current = before
                coming.close()
                raise coming.failure() if coming.death else _ending()
            if before is not None:
                before.serves = False
        self._newest, self.last_wanted = coming, coming.wanted
        self._parts.figures.follow(coming.stats)

    def _take_away(self, state: State, reason: str) -> None:
        """Calls that come from now on are refused."""
        with self._lock:
            if self._lifecycle.move(state, reason):
                self.current.serves, self.current = False, None
        if self.current is not None:
            raise _ending()

    async def _retire(self, change: Change, old: HostedModel, grace_s: float | None) -> None:
        """Returns when its calls have ended, or were ended after `grace_s`, and its memory is free."""
        until = None if grace_s is None else self._parts.clock() + grace_s
        calls_ended = 0
        while old.busy and not old.death:
            change.before_calls = len(old.desk.visits)
            if until is not None and self._parts.clock() >= until:
                about = f"the model {old.name!r} is taken away"
                calls_ended = old.end_calls(ServiceError(Kind.UNAVAILABLE, f"{about}; ask again.", retry_after_s=1.0))
            await asyncio.sleep(LOOK_EVERY_S)
        change.before_calls = 0
        while not await old.stop(JOIN_S) and not old.death:
            pass
        freed = await self._freed(old)
        self._parts.changed(ChangeRecord("retire", old.name, calls_ended=calls_ended, freed=freed))

    async def _discard(self, coming: HostedModel) -> None:
        await coming.stop(JOIN_S)
        await self._freed(coming)

    async def _freed(self, gone: HostedModel) -> bool:
        if gone.llm is not None:
            self._parts.figures.forget(gone.stats)
        return await gone.free()

    # How a change runs.

    def _refuse_another(self) -> None:
        if self._lifecycle.ends:
            self._lifecycle.refuse_unless_serving()
        if self.change is not None:
            about = f"a {self.change.action} of {self.change.model!r} is under way ({self.change.step})"
            raise ServiceError(Kind.CONFLICT, f"{about}; ask for the status, and come again when it has ended.")

    def _begun(self, action: str, model: str, caller: Caller) -> Change:
        return Change(action, model, caller.key_id, caller.peer, asyncio.get_running_loop().create_future())

    def _begin(self, change: Change, steps: Coroutine) -> None:
        self.change = change
        self._task = asyncio.create_task(steps)
        self._task.add_done_callback(partial(self._ended, change))

    def _ended(self, change: Change, task: asyncio.Task) -> None:
        error = _ending() if task.cancelled() else task.exception()
        if isinstance(error, ServiceError):
            error.recorded = True
            change.fail(error)
        elif error is not None:
            LOG.error("a change of models failed", exc_info=error)
            change.fail(ServiceError(Kind.INTERNAL, "the change failed for a reason of the server's own; see its log."))
        self._tell(change)
        change.step = "ended"
        self.last_change, self.change = change.status(), None

    def _tell(self, change: Change) -> None:
        """Leaves the record of its outcome, once."""
        if not change.told:
            change.told = True
            who = change.key_id, change.peer
            self._parts.changed(
                ChangeRecord(change.action, change.model, *who, change.outcome, change.error, change.seconds)
            )

    # From engines' and watchdogs' threads.

    def _made(self, wanted: Wanted) -> HostedModel:
        hosted = HostedModel(wanted, self._housing, self._on_loaded, self._on_death)
        self._hosted = [*(one for one in self._hosted if one.in_use), hosted]
        return hosted

    def _on_loaded(self, hosted: HostedModel) -> None:
        with self._lock:
            if self.current is None:
                self._lifecycle.move(State.WARMING)

    def _on_death(self, hosted: HostedModel, reason: str) -> None:
        with self._lock:
            hosted.death = reason
            if hosted is self.current or hosted is self._first:
                self._lifecycle.move(State.FAILED, reason)


def _ending() -> ServiceError:
    return ServiceError(Kind.UNAVAILABLE, "the server is shutting down; ask another one.", retry_after_s=1.0)
