# SPDX-License-Identifier: Apache-2.0
"""A whole server in this process: a model, the service, the gRPC and HTTP fronts on free ports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from metrale_jax import LLM
from serving.core.gate import Gate
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.records import CallRecord
from serving.core.service import Parts, Service, ServiceSettings
from serving.core.tracing import Tracing
from serving.fronts import Fronts
from serving.grpc.server import GrpcFront, make_server
from serving.grpc.settings import GrpcSettings
from serving.http.desk import Desk
from serving.http.server import HttpFront, make_http_server
from serving.http.settings import HttpSettings


@dataclass
class WholeServer:
    """What runs, and the records of calls that ended."""

    llm: LLM
    service: Service
    front: GrpcFront
    lifecycle: Lifecycle
    meter: Meter
    gate: Gate
    http: HttpFront
    records: list[CallRecord] = field(default_factory=list)

    @property
    def target(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.front.port}"

    @property
    def url(self) -> str:
        """Where those of HTTP do."""
        return f"http://127.0.0.1:{self.http.port}"

    async def quiet(self) -> None:
        """Waits until nothing is held by anybody, then lets the engine check itself."""
        async with asyncio.timeout(30):
            while self.service.num_calls or self.llm.engine.has_work:
                await asyncio.sleep(0.005)
        assert (self.meter.num_open, self.gate.num_waiting) == (0, 0)
        stats = self.llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_prefilling, stats.used_blocks) == (0, 0, 0, 0)
        self.llm.engine.check()


@contextlib.asynccontextmanager
async def whole_server(
    llm: LLM,
    keys: KeyRing | None = None,
    gate: tuple[int, int] = (0, 0),
    settings: ServiceSettings = ServiceSettings("tiny", warm_up=False),  # noqa: B008
) -> AsyncIterator[WholeServer]:
    """A server over a model that is loaded; it is drained and checked at the end."""
    loop = asyncio.get_running_loop()
    keys, records, lifecycle = keys or KeyRing.anonymous(), [], Lifecycle()
    meter, door = Meter(keys.limits_of, loop.time), Gate(*gate, loop.time)
    service = Service(lambda: llm, settings, Parts(keys, meter, door, lifecycle, records.append, Tracing()))
    front = make_server(service, GrpcSettings(port=0))
    http = make_http_server(Desk(service, lifecycle, HttpSettings(port=0), stats=llm.stats))
    server = WholeServer(llm, service, front, lifecycle, meter, door, http, records)
    fronts = Fronts({"grpc": front, "http": http})
    await fronts.start()
    serves = asyncio.Event()

    def moved(state: State, reason: str) -> None:
        loop.call_soon_threadsafe(fronts.set_serving, state is State.SERVING)
        if state in (State.SERVING, State.FAILED):
            loop.call_soon_threadsafe(serves.set)

    lifecycle.listen(moved)
    service.start()
    try:
        async with asyncio.timeout(60):
            await serves.wait()
        yield server
    finally:
        await service.drain(0.0)
        await fronts.stop()
        await service.stop(20)
