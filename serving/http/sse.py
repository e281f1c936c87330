# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: `EventStream` sends them as they come, at the pace of whoever reads, and comments in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from serving.http.errors import spelt
from serving.http.sending import EVENTS

DONE = b"data: [DONE]\n\n"
PING = b": still at work\n\n"
# A proxy that gathers answers would hold tokens back.
HEADERS = (
    (b"content-type", f"{EVENTS}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
END = b""


def data(value: Any) -> bytes:
    """An event that holds the value as JSON."""
    return b"data: " + spelt(value) + b"\n\n"


def named(name: str, value: Any) -> bytes:
    """The same of an event with a name."""
    return f"event: {name}\n".encode() + data(value)


class EventStream:
    """An answer of events, an ASGI application. They are asked for the next when the last is on its way, and closed
    however it ends.

    Its head waits for the first of them, so that a call that is refused gets a status; not longer than `ping_s`. After
    each `ping_s` without an event a comment is sent.
    """

    def __init__(self, events: AsyncIterator[bytes], ping_s: float):
        self._events, self._ping_s = events, ping_s
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; raises what they raise."""
        async with aclosing(self._events) as events:
            first = asyncio.create_task(_next(events))
            try:
                await asyncio.wait((first,), timeout=self._ping_s)
                if first.done():
                    first.result()
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                async with self._pinging(send):
                    event = await first
                    while event is not END:
                        self._num_sent += 1
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                        event = await _next(events)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        pings = asyncio.create_task(self._ping(send))
        try:
            yield
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _ping(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._ping_s)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events, END)
