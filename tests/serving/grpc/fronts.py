# SPDX-License-Identifier: Apache-2.0
"""A front over a scripted service, with a client on the same loop."""

import asyncio
from collections.abc import Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from serving.grpc.server import GrpcFront, make_server
from serving.grpc.settings import GrpcSettings
from serving.grpc.stubs import generate_pb2 as pb
from serving.grpc.stubs import generate_pb2_grpc, open_inference_pb2_grpc
from tests.serving.scripted import ScriptedService

TIMEOUT_S = 20


@dataclass(frozen=True)
class World:
    """What a test needs of a running front."""

    service: ScriptedService
    front: GrpcFront
    channel: grpc.aio.Channel
    stub: Any
    kserve: Any


def run(test: Coroutine, timeout_s: float = TIMEOUT_S) -> None:
    """Runs a test, which hangs no longer than `timeout_s`."""

    async def bounded():
        async with asyncio.timeout(timeout_s):
            await test

    asyncio.run(bounded())


def world_of(service: ScriptedService, front: GrpcFront, channel: grpc.aio.Channel) -> World:
    """The world around a channel."""
    stub = generate_pb2_grpc.GenerateServiceStub(channel)
    return World(service, front, channel, stub, open_inference_pb2_grpc.GRPCInferenceServiceStub(channel))


@asynccontextmanager
async def fronted(service: ScriptedService, *, options=(), **settings):
    """A started front that serves, and a channel to it."""
    front = make_server(service, GrpcSettings(port=0, **settings))
    await front.start()
    front.set_serving(True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", options=options) as channel:
            yield world_of(service, front, channel)
    finally:
        await front.stop()


def asked(text: str = "hello", request_id: str = "", **params) -> pb.GenerateRequest:
    """A request."""
    return pb.GenerateRequest(
        request_id=request_id, prompt=pb.Prompt(text=text), params=pb.SamplingParams(**params) if params else None
    )


def started(text: str, request_id: str, **params) -> pb.GenerateStreamRequest:
    """A request of a stream of them."""
    return pb.GenerateStreamRequest(generate=asked(text, request_id, **params))


def taken_back(request_id: str) -> pb.GenerateStreamRequest:
    """The end of one, asked for."""
    return pb.GenerateStreamRequest(cancel=pb.CancelRequest(request_id=request_id))


async def refused(call, code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """The error that the call ends with, which has `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if isinstance(call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    assert caught.value.code() == code, caught.value
    return caught.value


async def stalled(service: ScriptedService) -> None:
    """Comes back when the service has been asked for events and is asked for no more."""
    last = -1
    while last != service.num_pulled or not last:
        last = service.num_pulled
        await asyncio.sleep(0.1)
