# SPDX-License-Identifier: Apache-2.0
"""`SidePort`: `/metrics`, `/health` and `/ready` over plain HTTP, from a thread of its own.

It shares nothing with the calls' event loop and waits for no step of the engine, so it answers when they do not.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import h11

from metrale_jax.core.errors import ConfigError
from serving.core.lifecycle import Lifecycle, State

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
# A whole request, and a whole answer, may take so long: whoever is slower is cut off.
READ_S, WRITE_S = 5.0, 10.0
# The process has nothing more to give in these states, and whoever watches it should start another.
DEAD = (State.FAILED, State.STOPPED)


@dataclass(frozen=True)
class Page:
    """An answer: its status, its type, its body."""

    status: HTTPStatus
    content_type: str
    body: bytes


class SidePort:
    """Listens at `host` and `port` (0: any free one) from `start` to `stop`. `metrics()` gives the exposition and its
    content type."""

    def __init__(self, host: str, port: int, lifecycle: Lifecycle, metrics: Callable[[], tuple[bytes, str]]):
        self._host, self._port, self._lifecycle = host, port, lifecycle
        self._pages = {"/metrics": lambda: Page(HTTPStatus.OK, *reversed(metrics()))}
        self._pages |= {"/health": self._health, "/ready": self._ready}
        self._num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._listening = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="side port", daemon=True)

    def start(self) -> int:
        """The port that it listens on. Raises `ConfigError` where it cannot."""
        self._thread.start()
        self._listening.wait()
        if self._error is not None:
            raise ConfigError(
                f"side port {self._host}:{self._port} cannot be listened on ({self._error.strerror}); choose another."
            )
        return self._port

    def stop(self) -> None:
        """Nothing, when it no longer listens."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._connected, self._host, self._port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            self._error = error
            return
        else:
            self._port = server.sockets[0].getsockname()[1]
        finally:
            self._listening.set()
        async with server:
            await self._stopping.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            with suppress(TimeoutError, OSError):  # who is too slow, or gone, is not told
                if self._num_connections <= MAX_CONNECTIONS:
                    await self._answer(reader, writer)
                    async with asyncio.timeout(WRITE_S):
                        writer.close()
                        await writer.wait_closed()
        finally:
            self._num_connections -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request to a connection: scrapes and probes are seconds apart."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(READ_S):
                request = await _request(connection, reader)
        except h11.RemoteProtocolError as error:
            page, with_body = _text(HTTPStatus(error.error_status_hint), "no request that is understood"), True
        else:
            if request is None:
                return
            page, with_body = self._page(request), request.method != b"HEAD"
        headers = [
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("cache-control", "no-store"),
            ("connection", "close"),
        ]
        head = h11.Response(status_code=page.status, reason=page.status.phrase.encode(), headers=headers)
        data = connection.send(head) + (page.body if with_body else b"")
        async with asyncio.timeout(WRITE_S):
            writer.write(data)
            await writer.drain()

    def _page(self, request: h11.Request) -> Page:
        make = self._pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        if make is None:
            return _text(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if request.method not in (b"GET", b"HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are served")
        return make()

    def _health(self) -> Page:
        return self._state(lambda state: state not in DEAD)

    def _ready(self) -> Page:
        return self._state(lambda state: state is State.SERVING)

    def _state(self, good: Callable[[State], bool]) -> Page:
        state, reason = self._lifecycle.snapshot()
        status = HTTPStatus.OK if good(state) else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps({"state": state.value, "reason": reason}).encode() + b"\n"
        return Page(status, "application/json", body)


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The head of the request; its body, if it has one, is not read. None where nothing came."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(MAX_HEAD_BYTES))


def _text(status: HTTPStatus, about: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{status.phrase}: {about}.\n".encode())
