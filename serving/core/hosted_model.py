# SPDX-License-Identifier: Apache-2.0
"""`HostedModel`: one model with all that is its own: engine thread, link, turns, the calls inside, and its memory."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metrale_jax.core.errors import MetraleError
from metrale_jax.process_memory import release_freed_memory
from metrale_jax.progress import Progress
from serving.chat.model import ChatModel
from serving.core.cards import chat_model, model_card
from serving.core.catalog import Wanted
from serving.core.changes import LoadProgress
from serving.core.engine_thread import EngineThread
from serving.core.errors import Kind, ServiceError
from serving.core.events import ModelCard
from serving.core.link import EngineLink
from serving.core.parts import Parts
from serving.core.pulse import Watchdog
from serving.core.turns import Turns
from serving.core.visit import Desk

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats
    from metrale_jax.llm import LLM
    from metrale_jax.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)
# Answers in the engine for each that can run: so that a slot that is given back is taken at once.
QUEUED_PER_SEQUENCE = 2
# What a device says that has no room, whatever the class of its error.
NO_ROOM = ("RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY")
# How often a model that is gone is looked for: what somebody prepared for it may hold it a little longer.
COLLECT_AFTER_S = (0.0, 0.05, 0.25)

Load = Callable[[Wanted, Progress], "LLM"]


@dataclass(frozen=True)
class Housing:
    """What all models of a service have in common: how one is made, the parts of the service, the threads beside the
    engine; and the seconds that a step, and one that compiles, may take (0: as long as it takes)."""

    load: Load
    parts: Parts
    beside: Executor
    warm_up: bool = True
    stuck_after_s: float = 60.0
    compile_after_s: float = 600.0


class HostedModel:
    """To be made on the running event loop; `start` begins to load. `on_loaded(self)` and `on_death(self, reason)` are
    called in its threads, the latter once it cannot serve (any more): before calls inside are told so.

    `serves` while calls that come go to it; once it is `closed` it takes none. `death` is why it cannot serve,
    `lacks_room` that it found no memory. `ready` is done once calls can be answered, with a `ServiceError` where that
    will never be.
    """

    def __init__(
        self,
        wanted: Wanted,
        housing: Housing,
        on_loaded: Callable[["HostedModel"], None],
        on_death: Callable[["HostedModel", str], None],
    ):
        self.wanted, self.progress = wanted, LoadProgress()
        self._housing, self._on_loaded, self._on_death = housing, on_loaded, on_death
        self.llm: LLM | None = None
        self.tokenizer: Tokenizer | None = None
        self.card: ModelCard | None = None
        self.chat: ChatModel | None = None
        self.death, self.serves = "", False
        # Who asked about it and has yet to call: they should find it when they do.
        self.askers: weakref.WeakSet = weakref.WeakSet()
        self.lacks_room = self._started = self.closed = False
        self._failure: ServiceError | None = None
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.engine = EngineThread(self._made, self._deliver, self._loaded, self._warm, self._die, housing.warm_up)
        link = EngineLink(self._loop, self.engine.put)
        self.desk = Desk(housing.parts, link, Turns(self._max_inside), housing.beside, self._refuse)
        limits = {"step": housing.stuck_after_s, "compile": housing.compile_after_s}
        self._watchdog = Watchdog(
            self.engine.pulse, {name: limit for name, limit in limits.items() if limit}, self._die
        )

    def start(self) -> None:
        """Begins to load."""
        self._started = True
        self.engine.start()
        self._watchdog.start()

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.wanted.name

    @property
    def in_use(self) -> bool:
        """Whether anything of it is left: its thread, or calls that hold results of it."""
        return bool(self.desk.visits) or self.engine.alive

    @property
    def busy(self) -> bool:
        """Whether calls inside still need the model; what a slow reader has yet to take needs it no more."""
        return any(visit.needs_model for visit in self.desk.visits)

    def stats(self) -> "EngineStats":
        """How the engine stands."""
        assert self.llm is not None, "asked while it serves"
        return self.llm.stats()

    def model(self) -> "LLM":
        """The model. Raises `ServiceError` (UNAVAILABLE) where it is gone."""
        if self.llm is None:
            raise _gone()
        return self.llm

    def failure(self) -> ServiceError:
        """Why it does not serve, for who wanted it to."""
        assert self._failure is not None, "asked after its death"
        return self._failure

    def end_calls(self, error: ServiceError) -> int:
        """How many calls were inside and are ended by `error`."""
        left = list(self.desk.visits)
        for visit in left:
            visit.fail(error)
        return len(left)

    def close(self) -> None:
        """Takes no more calls, and lets its load go if it is at it."""
        self.closed = True
        self.progress.abandon()

    async def stop(self, timeout_s: float) -> bool:
        """Ends the engine thread; whether it did in time."""
        self.close()
        return await self._loop.run_in_executor(None, self._stop, timeout_s)

    async def free(self) -> bool:
        """Whether its memory is free again, after the engine thread has ended: nobody holds the model any more."""
        if self.llm is None:
            return True
        gone, self.llm = weakref.ref(self.llm), None
        for after_s in COLLECT_AFTER_S:
            await asyncio.sleep(after_s)
            await self._loop.run_in_executor(None, _collect)
            if gone() is None:
                return True
        LOG.error("the model %r was taken away, and something still holds its memory", self.name)
        return False

    def _refuse(self) -> None:
        if self.closed:
            raise _gone()

    def _max_inside(self) -> int:
        return QUEUED_PER_SEQUENCE * self.llm.config.max_sequences if self.llm else 0

    def _stop(self, timeout_s: float) -> bool:
        self._watchdog.stop()
        return not self._started or self.engine.stop(timeout_s)

    # From the engine's and the watchdog's threads.

    def _made(self) -> "LLM":
        return self._housing.load(self.wanted, self.progress)

    def _deliver(self, reports: Sequence) -> None:
        self.desk.link.deliver(reports)

    def _loaded(self, llm: "LLM") -> None:
        self.card, self.chat, self.tokenizer = model_card(llm, self.name), chat_model(llm), llm.loaded.tokenizer
        if not self.closed:
            self.llm = llm
        self._on_loaded(self)

    def _warm(self, llm: "LLM") -> None:
        self.progress.close()
        self._tell(None)

    def _die(self, reason: str) -> None:
        # Of the error only words are kept: its frames hold the model.
        error, self.engine.error = self.engine.error, None
        self.lacks_room = isinstance(error, MemoryError) or any(word in str(error) for word in NO_ROOM)
        self._failure = self._told(error, reason)
        self._on_death(self, reason)
        self.desk.link.sever(ServiceError(Kind.UNAVAILABLE, f"{reason}; come again or ask another server."))
        self._tell(reason)

    def _told(self, error: BaseException | None, reason: str) -> ServiceError:
        if isinstance(error, MetraleError):
            return ServiceError(Kind.INVALID, str(error), field="model")
        if self.lacks_room:
            return no_room(self.name)
        return ServiceError(Kind.INTERNAL, f"{self.name!r} could not be loaded ({reason}); see the server's log.")

    def _tell(self, reason: str | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, reason)

    def _settle(self, reason: str | None) -> None:
        if self.ready.done():
            return
        if reason is None:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(self.failure())
            self.ready.exception()  # whether or not somebody waits for it


def _gone() -> ServiceError:
    return ServiceError(Kind.UNAVAILABLE, "the model was taken away; ask again for what is there.", retry_after_s=0.1)


def _collect() -> None:
    gc.collect()
    release_freed_memory()


def no_room(name: str) -> ServiceError:
    """The error for a model that finds no memory."""
    about = f"the device has no room for {name!r}; ask for less by options, or for drain_first."
    return ServiceError(Kind.INTERNAL, about)
