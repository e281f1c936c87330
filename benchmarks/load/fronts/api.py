# SPDX-License-Identifier: Apache-2.0
"""What a driver does: `AbstractDriver` in the process that measures, `AbstractClients` in those of the clients."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from benchmarks.load.figures import Trace
from benchmarks.load.visits import Visit

# How often, and what. Comes back with the outcome.
Behaviours = Mapping[str, tuple[int, Callable[[Visit], Awaitable[str]]]]


class AbstractClients(ABC):
    """The clients of one process, on its event loop."""

    @abstractmethod
    async def connect(self, streams: int) -> None:
        """Comes back when `streams` requests at a time find their connections open."""

    @abstractmethod
    async def stream_one(self, ask: dict, deadline_s: float) -> Trace:
        """One streamed request's trace; raises nothing for one that failed."""

    @property
    @abstractmethod
    def behaviours(self) -> Behaviours:
        """What a stream of a soak may do."""

    @property
    @abstractmethod
    def errors(self) -> tuple[type[Exception], ...]:
        """What its requests raise where they fail; each has a `code`."""


class AbstractDriver(ABC):
    """How one front is spoken to. `target` is HOST:PORT."""

    @property
    @abstractmethod
    def packages(self) -> Sequence[str]:
        """The packages whose versions figures depend on."""

    @abstractmethod
    def serves(self, target: str, within_s: float) -> bool:
        """Whether the server takes calls."""

    @abstractmethod
    def vocab_size(self, target: str) -> int:
        """Of the model that is served."""

    @abstractmethod
    def answers(self, target: str, requests: Sequence[dict]) -> list[dict]:
        """`token_ids` and `text` of the answer to each request (prompt, params), asked one after the other."""

    @abstractmethod
    def clients(self, target: str) -> AbstractAsyncContextManager[AbstractClients]:
        """Clients that are closed at the end of the context."""
