# SPDX-License-Identifier: Apache-2.0
"""`make_http_server`: the HTTP front over a service, from its port to its last call."""

import asyncio
import contextlib

import uvicorn

from serving.core.front import AbstractFront
from serving.http.app import make_app
from serving.http.connections import Connections
from serving.http.desk import Desk
from serving.http.listening import BACKLOG, listening_sockets, tls_context

# What an ended call may take to give back what it holds, and its last words to leave.
STOP_S, LINGER_S = 5.0, 0.2
TICK_S = 1.0
# A head beyond this is no request.
MAX_HEAD_BYTES = 64 << 10


class HttpFront(AbstractFront):
    """An HTTP server on the event loop that starts it. `port` is the one it listens on once started.

    It is uvicorn without its signals and its main loop: both are the server's own.
    """

    def __init__(self, desk: Desk):
        self._desk = desk
        self._uvicorn: uvicorn.Server | None = None
        self._ticking: asyncio.Task | None = None
        self._connections = Connections(desk.settings)
        self.port = desk.settings.port

    async def start(self) -> int:
        settings = self._desk.settings
        tls = None if settings.tls is None else tls_context(settings.tls)
        sockets = listening_sockets(settings.host, settings.port)
        self.port = sockets[0].getsockname()[1]
        config = uvicorn.Config(
            make_app(self._desk),
            http=self._connections.protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_s,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        config.ssl = tls
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)
        await self._uvicorn.on_tick(0)
        await self._uvicorn.startup(sockets=sockets)
        self._ticking = asyncio.create_task(self._tick())
        return self.port

    def set_serving(self, serving: bool) -> None:
        # /health and /ready ask the lifecycle themselves.
        pass

    async def drain(self, grace_s: float) -> None:
        # Who comes while calls end is told so, and probes where the server stands, rather than find nobody.
        self._desk.calls.draining = True
        self._connections.close_idle()
        await self._idle(grace_s)
        await self.stop()

    async def stop(self) -> None:
        self._desk.calls.draining = True
        if self._uvicorn is None:
            return
        for server in self._uvicorn.servers:
            server.close()
        self._connections.close_idle()
        self._desk.calls.end_all()
        await self._idle(STOP_S)
        await self._connections.close(LINGER_S)
        self._ticking.cancel()

    async def _idle(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._desk.calls.idle.wait()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            # The date of answers.
            await self._uvicorn.on_tick(0)
            self._connections.sweep(asyncio.get_running_loop().time())


def make_http_server(desk: Desk) -> HttpFront:
    """The front, not started."""
    return HttpFront(desk)
