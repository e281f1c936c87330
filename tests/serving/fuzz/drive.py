# SPDX-License-Identifier: Apache-2.0
"""Sends inputs to a server and judges what comes back."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

import grpc

from tests.serving.fuzz.inputs import Input

SERVICE = "metrale.v1.GenerateService"
# What a client may be told of what it did. All else is the server's fault.
FAIR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
LIMIT_S = 60.0


def _same(message: bytes) -> bytes:
    return message


class Judge:
    """What became of the inputs: counts by status, and those whose end was not fair or took too long."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.faults: list[tuple[str, Input]] = []
        self.slowest_s, self.slowest = 0.0, None

    def saw(self, case: Input, code: grpc.StatusCode, details: str, took_s: float) -> None:
        """Notes the end of one."""
        self.counts[code.name] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, case
        if code not in FAIR:
            self.faults.append((f"{code.name}: {details[:200]}", case))


async def send_all(channel: grpc.aio.Channel, inputs: Iterable[Input], judge: Judge, at_once: int = 8) -> None:
    """Sends all inputs, so many at a time."""
    cases = iter(inputs)

    async def work() -> None:
        for case in cases:
            began = time.monotonic()
            code, details = await _send(channel, case)
            judge.saw(case, code, details, time.monotonic() - began)

    await asyncio.gather(*[work() for _ in range(at_once)])


async def _send(channel: grpc.aio.Channel, case: Input) -> tuple[grpc.StatusCode, str]:
    path, named = f"/{SERVICE}/{case.method}", {"request_serializer": _same, "response_deserializer": _same}
    try:
        match case.method:
            case "GenerateStream":
                call = channel.stream_stream(path, **named)(iter(case.messages), timeout=LIMIT_S)
                async for _ in call:
                    pass
            case "Generate" | "Fork":
                call = channel.unary_stream(path, **named)(case.messages[0], timeout=LIMIT_S)
                async for _ in call:
                    pass
            case _:
                await channel.unary_unary(path, **named)(case.messages[0], timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
