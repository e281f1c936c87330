# SPDX-License-Identifier: Apache-2.0
"""HTTP: /v1/completions over connections that are kept, one for each stream at a time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from urllib.request import urlopen

from benchmarks.load.figures import LATE, Trace
from benchmarks.load.fronts.api import AbstractClients, AbstractDriver, Behaviours
from benchmarks.load.fronts.http_client import Connection, Connections, Cut, HttpError, request
from benchmarks.load.fronts.http_visits import BEHAVIOURS, PATH, TIMEOUT_HEADER, body_of
from benchmarks.load.visits import PATIENCE_S

STATUSES = {"timeout": LATE}


class HttpDriver(AbstractDriver):
    """The driver of the HTTP front."""

    packages = ("h11", "starlette", "uvicorn")

    def serves(self, target: str, within_s: float) -> bool:
        try:
            with urlopen(f"http://{target}/ready", timeout=within_s) as answer:
                return answer.status == 200
        except OSError:
            return False

    def vocab_size(self, target: str) -> int:
        with urlopen(f"http://{target}/v1/models", timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"][0]["vocab_size"]

    def answers(self, target: str, requests: Sequence[dict]) -> list[dict]:
        async def ask() -> list[dict]:
            connection, found = await Connection.open(target), []
            for known in requests:
                connection.send(request(target, PATH, body_of(known)))
                found.append((await connection.answer())["choices"][0])
            connection.close()
            return found

        return [{"token_ids": choice["token_ids"], "text": choice["text"]} for choice in asyncio.run(ask())]

    @asynccontextmanager
    async def clients(self, target: str) -> AsyncIterator["HttpClients"]:
        connections = Connections(target)
        try:
            yield HttpClients(connections)
        finally:
            connections.close()


class HttpClients(AbstractClients):
    """Clients that share what connections are free."""

    errors = (HttpError, Cut)

    def __init__(self, connections: Connections):
        self.connections, self.target = connections, connections.target

    async def connect(self, streams: int) -> None:
        for connection in await asyncio.gather(*(self.connections.take() for _ in range(streams))):
            self.connections.keep(connection)

    async def stream_one(self, ask: dict, deadline_s: float) -> Trace:
        trace = Trace(time.monotonic(), [])
        params = {"temperature": 0, "max_tokens": ask["max_tokens"], "ignore_eos": True}
        body = body_of({"prompt": ask["prompt"], "params": params}, stream=True)
        try:
            connection = await self.connections.take()
            connection.send(request(self.target, PATH, body, {TIMEOUT_HEADER: f"{deadline_s:g}"}))
            async for event in connection.events():
                ids = event["choices"][0].get("token_ids")
                if ids:
                    trace.arrivals.append((time.monotonic(), len(ids)))
            self.connections.keep(connection)
        except (HttpError, Cut) as error:
            trace.status = STATUSES.get(error.code, error.code)
        trace.ended_s = time.monotonic()
        return trace

    @property
    def behaviours(self) -> Behaviours:
        return {name: (weight, partial(behave, self)) for name, (weight, behave) in BEHAVIOURS.items()}
