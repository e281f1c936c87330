# SPDX-License-Identifier: Apache-2.0
"""`Fronts`: all that listens for calls, from one service, as one."""

import asyncio
from collections.abc import Mapping

from metrale_jax.core.errors import ConfigError
from serving.core.front import AbstractFront


class Fronts:
    """Fronts by their names, on the event loop that starts them."""

    def __init__(self, by_name: Mapping[str, AbstractFront]):
        self._by_name = dict(by_name)

    async def start(self) -> Mapping[str, int]:
        """All listen; the port of each. Raises `ConfigError` for an address that one cannot have: none listens then."""
        ports: dict[str, int] = {}
        try:
            for name, front in self._by_name.items():
                ports[name] = await front.start()
        except ConfigError:
            await self.stop()
            raise
        return ports

    def set_serving(self, serving: bool) -> None:
        """Says whether calls are welcome."""
        for front in self._by_name.values():
            front.set_serving(serving)

    async def drain(self, grace_s: float) -> None:
        """Takes no more calls and lets those that run end, for `grace_s` at most; then ends them and stops."""
        await asyncio.gather(*(front.drain(grace_s) for front in self._by_name.values()))

    async def stop(self) -> None:
        """Ends all calls and stops."""
        await asyncio.gather(*(front.stop() for front in self._by_name.values()))
