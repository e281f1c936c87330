# SPDX-License-Identifier: Apache-2.0
"""`Parts`: what the service is put together from, and who hears of what befalls it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.core.gate import Gate
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle
from serving.core.limits import Meter
from serving.core.records import ChangeRecord, Observer
from serving.core.tracing import Tracing

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats


class AbstractFigures(ABC):
    """Who watches engines: of the one that serves its figures, of all that there were what they counted."""

    @abstractmethod
    def follow(self, stats: "Callable[[], EngineStats]") -> None:
        """Nothing; the engine that `stats()` tells of serves from now on."""

    @abstractmethod
    def forget(self, stats: "Callable[[], EngineStats]") -> None:
        """Nothing; asks an engine that was followed for the last time, if it was."""


class NoFigures(AbstractFigures):
    """Watches nothing."""

    def follow(self, stats: "Callable[[], EngineStats]") -> None:
        pass

    def forget(self, stats: "Callable[[], EngineStats]") -> None:
        pass


def unheard(record: ChangeRecord) -> None:
    """Nothing; nobody hears of a change."""


def ample() -> bool:
    """Yes; there is room for as many programs as anybody compiles."""
    return True


@dataclass(frozen=True)
class Parts:
    """What the service is put together from. `observer` hears of calls that ended, `changed` of changes of models, both
    on the event loop; both have to be quick. `room_for_two` says whether the programs of another model have room
    beside those that are there."""

    keys: KeyRing
    meter: Meter
    gate: Gate
    lifecycle: Lifecycle
    observer: Observer
    tracing: Tracing
    clock: Callable[[], float] = field(default=time.monotonic)
    changed: Callable[[ChangeRecord], None] = field(default=unheard)
    figures: AbstractFigures = field(default_factory=NoFigures)
    room_for_two: Callable[[], bool] = field(default=ample)
