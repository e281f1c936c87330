# SPDX-License-Identifier: Apache-2.0
"""`Hosting`: the models in memory, and which of them serves. On the event loop.

One is `current`; one may be on its way, and one may be leaving whose calls have yet to end.
"""

import asyncio
from threading import Lock

from serving.core.catalog import Wanted
from serving.core.errors import Kind, ServiceError
from serving.core.events import ModelCard
from serving.core.hosted_model import HostedModel, Housing
from serving.core.lifecycle import State

# Where a thread cannot be waited for: it loads, or hangs.
NO_WAIT_S = 0.2


class Hosting:
    """`first` is the model to begin with, not yet started; where that or the one that serves dies, the server has
    FAILED."""

    def __init__(self, first: Wanted, housing: Housing):
        self._housing, self._lifecycle = housing, housing.parts.lifecycle
        # Held for as long as it takes to say which model serves: engine threads tell at any time that they are dead.
        self._lock = Lock()
        self.current: HostedModel | None = None
        self._hosted: list[HostedModel] = []
        self.newest = self._first = self.made(first)

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
        return self.current or self.newest

    def made(self, wanted: Wanted) -> HostedModel:
        """A model of this server, not started."""
        hosted = HostedModel(wanted, self._housing, self._on_loaded, self._on_death)
        self._hosted = [*(one for one in self._hosted if one.in_use), hosted]
        return hosted

    def install(self, coming: HostedModel) -> None:
        """Calls that come from now on go to it. Raises `ServiceError` where it is dead, or the server at its end."""
        with self._lock:
            if coming.death:
                raise coming.failure()
            before, self.current = self.current, coming
            if not self._lifecycle.move(State.SERVING) and self._lifecycle.state is not State.SERVING:
                self.current = before
                coming.close()
                raise ending()
            coming.serves = True
            if before is not None:
                before.serves = False
        self.newest = coming

    def take_away(self, state: State, reason: str) -> HostedModel:
        """The model that served: calls that come from now on are refused. Raises `ServiceError` at the server's end."""
        with self._lock:
            if not self._lifecycle.move(state, reason):
                raise ending()
            old, self.current = self.current, None
            old.serves = False
        return old

    def end_calls(self, error: ServiceError) -> int:
        """How many calls were under way and are ended by `error`."""
        return sum(one.end_calls(error) for one in self._hosted)

    async def stop(self, timeout_s: float) -> bool:
        """Ends all engine threads; whether they did in time."""
        waits = [timeout_s if one.ready.done() else min(timeout_s, NO_WAIT_S) for one in self._hosted]
        stopped = await asyncio.gather(*[one.stop(wait) for one, wait in zip(self._hosted, waits, strict=True)])
        return all(stopped)

    # From engines' and watchdogs' threads.

    def _on_loaded(self, hosted: HostedModel) -> None:
        with self._lock:
            if self.current is None:
                self._lifecycle.move(State.WARMING)

    def _on_death(self, hosted: HostedModel, reason: str) -> None:
        with self._lock:
            hosted.death = reason
            if hosted is self.current or (hosted is self._first and hosted is self.newest and not hosted.closed):
                self._lifecycle.move(State.FAILED, reason)


def ending() -> ServiceError:
    """What is told of what the server's end puts an end to."""
    return ServiceError(Kind.UNAVAILABLE, "the server is shutting down; ask another one.", retry_after_s=1.0)
