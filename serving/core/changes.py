# SPDX-License-Identifier: Apache-2.0
"""What is told of models and of changing them, and `LoadProgress`, which hears how far a load is."""

import asyncio
import time
from dataclasses import dataclass, field
from threading import Lock

from serving.core.errors import ServiceError
from serving.core.events import ModelCard

# Stages of a load that are told of, each new name counting as one: those of `LLM` are four.
MAX_STAGES = 16


@dataclass(frozen=True)
class Stage:
    """A part of a load and how much of it is done: "download" and "load" count bytes, "compile" programs. Parts
    overlap."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class ChangeStatus:
    """A change of models that is under way, or the last one that ended. `action` is "load" or "unload", `model` what
    clients call the model, `key_id` whose key asked for it ("" for the server's own start).

    `step` is "draining" (calls of the old model end, and it is unloaded), "loading", "warming" (programs are compiled),
    "restoring" (the load failed, and the model before is loaded again), "retiring" (the new model serves while calls of
    the old one end), or "ended". `outcome` is "" until it is known, then "ok" or a `Kind`'s value; `error` the reason.
    `before_calls` is how many calls of the model before are under way.
    """

    action: str
    model: str
    key_id: str
    step: str
    stages: tuple[Stage, ...]
    began: float
    seconds: float
    before_calls: int
    outcome: str
    error: str


@dataclass(frozen=True)
class ModelStatus:
    """How the server stands with its models: its state and the reason of it, the `model` that serves, the names of
    those that may be loaded, calls under way, and the changes."""

    state: str
    reason: str
    model: ModelCard | None
    loadable: tuple[str, ...]
    calls: int
    change: ChangeStatus | None
    last_change: ChangeStatus | None


class LoadAbandoned(Exception):
    """Ends a load that nobody waits for, out of its report of progress."""


class LoadProgress:
    """A `Progress` of one load. Stages report from several threads; after `abandon` the next report ends the load."""

    def __init__(self):
        self._stages: dict[str, Stage] = {}
        self._lock = Lock()
        self._abandoned = self._closed = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Takes in how far a stage is. Raises `LoadAbandoned` once the load is."""
        with self._lock:
            if self._closed:
                return
            if self._abandoned:
                raise LoadAbandoned
            if stage in self._stages or len(self._stages) < MAX_STAGES:
                self._stages[stage] = Stage(stage, done, total)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages so far."""
        with self._lock:
            return tuple(self._stages.values())

    def abandon(self) -> None:
        """Nothing; the load is wanted no more."""
        with self._lock:
            self._abandoned = True

    def close(self) -> None:
        """Nothing; the load is over, and what a step compiles later is no part of it."""
        with self._lock:
            self._closed = True


@dataclass(eq=False)
class Change:
    """A change under way; `told` once it left its record.

    `settled` is done when calls can be made as it was asked for, or when it is known that they cannot: what is left of
    the old model may outlast it.
    """

    action: str
    model: str
    key_id: str
    peer: str
    settled: "asyncio.Future[None]"
    step: str = "loading"
    progress: LoadProgress = field(default_factory=LoadProgress)
    before_calls: int = 0
    outcome: str = ""
    error: str = ""
    told: bool = False
    began: float = field(default_factory=time.time)
    _since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._since

    def succeed(self) -> None:
        """Nothing; it is as it was asked for."""
        self.outcome = "ok"
        self.settled.set_result(None)

    def fail(self, error: ServiceError) -> None:
        """Nothing; it is not as it was asked for. Only the first outcome counts."""
        if not self.settled.done():
            self.outcome, self.error = error.kind.value, str(error)
            self.settled.set_exception(error)
            self.settled.exception()  # whether or not somebody waits for it

    def status(self) -> ChangeStatus:
        """How it stands."""
        return ChangeStatus(
            action=self.action,
            model=self.model,
            key_id=self.key_id,
            step=self.step,
            stages=self.progress.stages,
            began=self.began,
            seconds=self.seconds,
            before_calls=self.before_calls,
            outcome=self.outcome,
            error=self.error,
        )
