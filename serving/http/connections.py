# SPDX-License-Identifier: Apache-2.0
"""`Connections`: how many there are, and for how long one may be there without a call."""

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.core.errors import Kind, ServiceError
from serving.http.errors import HttpFault, openai_body, spelt
from serving.http.sending import JSON
from serving.http.settings import HttpSettings

# How long a connection that was closed may take to send what it still holds.
CLOSING_S = 10.0


class Connections:
    """Uvicorn's connections. It gives them no time for the head of a request, and none to go."""

    def __init__(self, settings: HttpSettings):
        self._settings = settings
        self._open: set[H11Protocol] = set()
        # Of each that has no call under way, or is closing: its last cycle, how long it may be so, since when it is so.
        self._waits: dict[H11Protocol, tuple[Any, float, float]] = {}

    def protocol(self, *, server_state: Any, **more: Any) -> asyncio.Protocol:
        """What handles a connection that was just accepted."""
        self._open = server_state.connections
        if len(self._open) >= self._settings.max_connections:
            return _TurnedAway(self._settings.max_connections)
        return _Connection(server_state=server_state, **more)

    def sweep(self, now_s: float) -> None:
        """Cuts off those that have been silent, or on their way out, for too long."""
        waits: dict[H11Protocol, tuple[Any, float, float]] = {}
        for one in tuple(self._open):
            if _is_busy(one) and not one.transport.is_closing():
                continue
            limit_s = self._limit_s(one)
            # Every call is a new cycle, so a connection that had one since the last look waits anew.
            waits[one] = (one.cycle, limit_s, now_s)
            if waits[one][:2] == self._waits.get(one, ())[:2]:
                waits[one] = self._waits[one]
            if now_s - waits[one][2] > limit_s:
                one.transport.abort()
        self._waits = waits

    def close_idle(self) -> None:
        """Closes those without a call; the others close with the answer that they are at."""
        for one in tuple(self._open):
            if _is_busy(one):
                one.cycle.keep_alive = False
            else:
                one.shutdown()

    async def close(self, linger_s: float) -> None:
        """All are gone; what they still had to send they have sent within `linger_s`, or not at all."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + linger_s
        while self._open and loop.time() < until_s:
            await asyncio.sleep(0.005)
        for one in tuple(self._open):
            one.transport.abort()
        await asyncio.sleep(0)

    def _limit_s(self, one: H11Protocol) -> float:
        if one.transport.is_closing():
            return CLOSING_S
        # Uvicorn's own timer runs between calls, until the first byte of the next.
        is_between = one.timeout_keep_alive_task is not None
        return self._settings.keep_alive_s + 1.0 if is_between else self._settings.head_s


class _Connection(H11Protocol):
    """Uvicorn's, which tells of what is no request in an error object."""

    def send_400_response(self, msg: str) -> None:
        fault = HttpFault(HTTPStatus.BAD_REQUEST, "What came is no request of HTTP/1.1; send one, with a shorter head.")
        body = spelt(openai_body(fault, ""))
        headers = {"content-type": JSON, "content-length": str(len(body)), "connection": "close"}
        head = h11.Response(
            status_code=fault.status, headers=list(headers.items()), reason=fault.status.phrase.encode()
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class _TurnedAway(asyncio.Protocol):
    """A connection over the limit."""

    def __init__(self, max_connections: int):
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        message = f"there are {self._max_connections} connections, which is the limit; come again in a moment."
        body = spelt(openai_body(ServiceError(Kind.UNAVAILABLE, message), ""))
        status = HTTPStatus.SERVICE_UNAVAILABLE
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
        transport.write(f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + body)
        transport.close()


def _is_busy(one: H11Protocol) -> bool:
    return one.cycle is not None and not one.cycle.response_complete
