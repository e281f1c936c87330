# SPDX-License-Identifier: Apache-2.0
"""`AbstractFront`: what the server asks of everything that listens for calls."""

from abc import ABC, abstractmethod


class AbstractFront(ABC):
    """Lives on the event loop that starts it, beside other fronts, and takes no signals."""

    @abstractmethod
    async def start(self) -> int:
        """Listens; the port. Raises `ConfigError` for an address it cannot have."""

    @abstractmethod
    def set_serving(self, serving: bool) -> None:
        """Says, where its protocol has a way to, whether calls are welcome."""

    @abstractmethod
    async def drain(self, grace_s: float) -> None:
        """Takes no more calls and lets those that run end, for `grace_s` at most; then ends them and stops."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends all calls and stops; nothing where it is not started, or has stopped."""
