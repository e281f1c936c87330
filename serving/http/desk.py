# SPDX-License-Identifier: Apache-2.0
"""`Desk`: what handlers of HTTP need of the server."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.core.api import AbstractService
from serving.core.lifecycle import Lifecycle
from serving.http.calls import CallsInFlight
from serving.http.room import Room
from serving.http.settings import HttpSettings

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats


@dataclass(frozen=True)
class Desk:
    """`version` is what the server says of itself. `metrics()` gives the exposition and its content type, `stats()` the
    engine's figures, None before there is a model. `calls` are those under way, `room` is what their bodies share."""

    service: AbstractService
    lifecycle: Lifecycle
    settings: HttpSettings
    version: str = ""
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain; charset=utf-8")
    stats: "Callable[[], EngineStats | None]" = lambda: None
    calls: CallsInFlight = field(default_factory=CallsInFlight)
    room: Room = field(default_factory=Room)
