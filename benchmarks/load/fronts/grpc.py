# SPDX-License-Identifier: Apache-2.0
"""gRPC, by the project's own client: the streams of a process share a channel."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from benchmarks.load.figures import Trace
from benchmarks.load.fronts.api import AbstractClients, AbstractDriver, Behaviours
from benchmarks.load.fronts.grpc_visits import BEHAVIOURS, ONCE
from serving.client import AsyncClient, Client, ClientError, DeadlineError, UnavailableError


class GrpcDriver(AbstractDriver):
    """The driver of the gRPC front."""

    packages = ("grpcio", "protobuf")

    def serves(self, target: str, within_s: float) -> bool:
        with Client(target) as client:
            try:
                return client.health(timeout_s=within_s) == "SERVING"
            except (UnavailableError, DeadlineError):
                return False

    def vocab_size(self, target: str) -> int:
        with Client(target) as client:
            return client.models()[0].vocab_size

    def answers(self, target: str, requests: Sequence[dict]) -> list[dict]:
        with Client(target) as client:
            found = [client.generate(request["prompt"], **request["params"]) for request in requests]
        return [{"token_ids": list(answer.token_ids), "text": answer.text} for answer in found]

    @asynccontextmanager
    async def clients(self, target: str) -> AsyncIterator["GrpcClients"]:
        async with AsyncClient(target, retries=ONCE) as client:
            yield GrpcClients(client, target)


class GrpcClients(AbstractClients):
    """One client for all streams; `target` is for those that end their own connection."""

    errors = (ClientError,)

    def __init__(self, client: AsyncClient, target: str):
        self.client, self.target = client, target

    async def connect(self, streams: int) -> None:
        await self.client.models()

    async def stream_one(self, ask: dict, deadline_s: float) -> Trace:
        trace = Trace(time.monotonic(), [])
        params = {"temperature": 0, "max_tokens": ask["max_tokens"], "ignore_eos": True, "timeout_s": deadline_s}
        try:
            async with self.client.stream(ask["prompt"], **params) as stream:
                async for piece in stream:
                    if piece.token_ids:
                        trace.arrivals.append((time.monotonic(), len(piece.token_ids)))
        except ClientError as error:
            trace.status = error.code
        trace.ended_s = time.monotonic()
        return trace

    @property
    def behaviours(self) -> Behaviours:
        return {name: (weight, partial(behave, self)) for name, (weight, behave) in BEHAVIOURS.items()}
