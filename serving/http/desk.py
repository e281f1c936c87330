# SPDX-License-Identifier: Apache-2.0
"""`Desk`: what handlers of HTTP need of the server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from serving.core.api import AbstractCalls, AbstractService
from serving.core.lifecycle import Lifecycle
from serving.http.calls import CallsInFlight
from serving.http.room import Room
from serving.http.settings import HttpSettings

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats
    from serving.http.batch_work import BatchWork


@dataclass(frozen=True)
class Desk:
    """`version` is what the server says of itself. `metrics()` gives the exposition and its content type, `stats()` the
    engine's figures, None before there is a model, `waiting()` how many calls wait outside of it. `loading()` is how
    far a model on its way has come, as `/v1/stats` tells it, None where none is. `calls` are those under way, `room` is
    what their bodies share. `batches` are those of callers and their files, None where none are kept."""

    service: AbstractService
    lifecycle: Lifecycle
    settings: HttpSettings
    version: str = ""
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain; charset=utf-8")
    stats: "Callable[[], EngineStats | None]" = lambda: None
    waiting: Callable[[], int] = lambda: 0
    loading: Callable[[], Mapping[str, Any] | None] = lambda: None
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    room: Room = field(default_factory=Room)
    batches: "BatchWork | None" = None
    pin: AbstractCalls | None = None

    @property
    def model(self) -> AbstractCalls:
        """The service, or of it the one model that this desk is for."""
        return self.pin or self.service

    def pinned(self) -> "Desk":
        """The desk of one call, all of which goes to one model."""
        return replace(self, pin=self.service.pinned())
