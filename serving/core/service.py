# SPDX-License-Identifier: Apache-2.0
"""`Service`: what all fronts ask. Lives on their event loop; each model lives in an engine thread of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from serving.chat.model import ChatModel
from serving.core.api import AbstractCalls, AbstractService
from serving.core.calls import (
    Caller,
    DetokenizeCall,
    EmbedCall,
    ForkCall,
    GenerateCall,
    LoadCall,
    ScoreCall,
    TokenizeCall,
    UnloadCall,
)
from serving.core.catalog import Catalog, Wanted
from serving.core.changes import ModelStatus, Stage
from serving.core.errors import Kind, ServiceError
from serving.core.events import Embedded, Event, ModelCard, Scored
from serving.core.hosted_model import Housing, Load
from serving.core.hosting import Hosting
from serving.core.lifecycle import State
from serving.core.model_calls import CallLimits, ModelCalls
from serving.core.model_changes import ModelChanges
from serving.core.parts import Parts
from serving.core.records import ChangeRecord, refusal

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

__all__ = ["Parts", "Service", "ServiceSettings"]

# Between two looks at a change that is under way.
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class ServiceSettings:
    """`served_name` is the model's name to clients, where no catalog says otherwise. `timeout_s`, `max_timeout_s` and
    `keep_prompts` are as in `CallLimits`. A step may take `stuck_after_s`, one that compiles `compile_after_s`, before
    the engine counts as stuck, and a load that somebody asked for `load_after_s` before it is given up (0: never).
    `threads` prepare prompts beside the engine."""

    served_name: str
    timeout_s: float = 0.0
    max_timeout_s: float = 0.0
    stuck_after_s: float = 60.0
    compile_after_s: float = 600.0
    keep_prompts: bool = False
    warm_up: bool = True
    threads: int = 2
    load_after_s: float = 1800.0


class Service(AbstractService):
    """`load(wanted, progress)` makes a model, in its engine thread. To be made on the running event loop; `start`
    begins to load the first one of `catalog`, by default one that clients call `settings.served_name`."""

    def __init__(self, load: Load, settings: ServiceSettings, parts: Parts, catalog: Catalog | None = None):
        self.settings, self.parts = settings, parts
        self._catalog = catalog or Catalog(Wanted(settings.served_name))
        self._limits = CallLimits(settings.timeout_s, settings.max_timeout_s, settings.keep_prompts)
        self._beside = ThreadPoolExecutor(settings.threads, thread_name_prefix="prepare")
        housing = Housing(load, parts, self._beside, settings.warm_up, settings.stuck_after_s, settings.compile_after_s)
        self._hosting = Hosting(self._catalog.first, housing)
        self._changes = ModelChanges(self._hosting, parts, settings.load_after_s)

    def start(self) -> None:
        """Begins to load; `lifecycle` tells how far it is."""
        self._changes.start()

    async def drain(self, grace_s: float) -> int:
        """Takes no more calls and waits for those under way, at most `grace_s`; how many had to be ended then. A change
        of models that is under way is given up."""
        self.parts.lifecycle.move(State.DRAINING, "the server is shutting down")
        await self._changes.give_up()
        until = self.parts.clock() + grace_s
        while self.num_calls and self.parts.clock() < until:
            await asyncio.sleep(0.02)
        return self._hosting.end_calls(
            ServiceError(Kind.UNAVAILABLE, "the server is shutting down; try again, or another one.", retry_after_s=1.0)
        )

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the engine threads; whether they did in time. One that loads is not waited for."""
        await self._changes.give_up()
        stopped = await self._hosting.stop(timeout_s)
        self._beside.shutdown(wait=False, cancel_futures=True)
        self.parts.lifecycle.move(State.STOPPED)
        return stopped

    @property
    def llm(self) -> "LLM | None":
        """The model that serves, for its stats; None while there is none. Not to be kept."""
        current = self._hosting.current
        return None if current is None else current.llm

    @property
    def stage(self) -> Stage | None:
        """How far the load that is under way has come; None without one."""
        change = self._changes.now
        stages = () if change is None or change.outcome else change.progress.stages
        return stages[-1] if stages else None

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn in the engine that serves."""
        current = self._hosting.current
        return 0 if current is None else current.desk.turns.num_waiting

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return self._hosting.num_calls

    def pinned(self) -> AbstractCalls:
        return ModelCalls(self._hosting.front, self._limits)

    def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Event]:
        return self.pinned().generate(call, caller)

    def fork(self, call: ForkCall, caller: Caller) -> AsyncIterator[Event]:
        return self.pinned().fork(call, caller)

    async def score(self, call: ScoreCall, caller: Caller) -> Sequence[Scored]:
        return await self.pinned().score(call, caller)

    async def embed(self, call: EmbedCall, caller: Caller) -> Sequence[Embedded]:
        return await self.pinned().embed(call, caller)

    async def tokenize(self, call: TokenizeCall, caller: Caller) -> Sequence[int]:
        return await self.pinned().tokenize(call, caller)

    async def detokenize(self, call: DetokenizeCall, caller: Caller) -> str:
        return await self.pinned().detokenize(call, caller)

    def models(self) -> Sequence[ModelCard]:
        card = self._hosting.card
        return () if card is None else (card,)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return self.pinned().token_text(token_id)

    def chat_model(self) -> ChatModel:
        return self.pinned().chat_model()

    def authenticate(self, token: str | None, peer: str) -> Caller:
        return self.parts.keys.authenticate(token, peer)

    def refused(self, method: str, peer: str, error: ServiceError) -> None:
        if not error.recorded:
            error.recorded = True
            self.parts.observer(refusal(method, peer, error))

    async def load_model(self, call: LoadCall, caller: Caller) -> ModelStatus:
        last = self._changes.last_wanted
        name = call.served_name or call.model or last.name
        with _Refusal(self.parts, "load", name, caller):
            self._catalog.refuse_unless_allowed(caller)
            wanted = self._catalog.wanted(call, last)
            change = self._changes.load(wanted, call.drain_first, call.grace_s, caller)
        await asyncio.shield(change.settled)
        return self._status()

    async def unload_model(self, call: UnloadCall, caller: Caller) -> ModelStatus:
        with _Refusal(self.parts, "unload", self._changes.last_wanted.name, caller):
            self._catalog.refuse_unless_allowed(caller)
            change = self._changes.unload(call.grace_s, caller)
        await asyncio.shield(change.settled)
        return self._status()

    def model_status(self, caller: Caller) -> ModelStatus:
        self._catalog.refuse_unless_allowed(caller)
        return self._status()

    async def model_changes(self, caller: Caller) -> AsyncIterator[ModelStatus]:
        self._catalog.refuse_unless_allowed(caller)
        told = None
        while True:
            status = self._status()
            if _timeless(status) != told:
                told = _timeless(status)
                yield status
            if status.change is None:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _status(self) -> ModelStatus:
        state, reason = self.parts.lifecycle.snapshot()
        change = self._changes.now
        return ModelStatus(
            state=state.value,
            reason=reason,
            model=self._hosting.card,
            loadable=self._catalog.names,
            calls=self.num_calls,
            change=None if change is None else change.status(),
            last_change=self._changes.last,
        )


def _timeless(status: ModelStatus) -> ModelStatus:
    """The status without what changes from one look to the next though nothing happens."""
    change = None if status.change is None else replace(status.change, seconds=0.0)
    return replace(status, change=change, calls=0)


class _Refusal:
    """A context out of which a `ServiceError` leaves the record of a change that was refused."""

    def __init__(self, parts: Parts, action: str, model: str, caller: Caller):
        self._parts, self._action, self._model, self._caller = parts, action, model, caller

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ServiceError):
            error.recorded = True
            key_id, peer = self._caller.key_id, self._caller.peer
            self._parts.changed(ChangeRecord(self._action, self._model, key_id, peer, error.kind.value, str(error)))
