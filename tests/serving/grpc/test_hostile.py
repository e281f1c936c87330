# SPDX-License-Identifier: Apache-2.0
"""Clients that send garbage, too much, or do not read."""

import asyncio

import grpc
import pytest

from serving.core.events import Delta
from serving.grpc.stubs import generate_pb2 as pb
from tests.serving.grpc.fronts import asked, fronted, refused, run, stalled
from tests.serving.scripted import ScriptedService, answer

GENERATE = "/metrale.v1.GenerateService/"
KSERVE = "/inference.GRPCInferenceService/"
GARBAGE = {
    "truncated": asked("hello").SerializeToString()[:-2],
    "noise": b"\xff\xfe\xfd" * 100,
    # A text whose bytes are no UTF-8: a lone surrogate.
    "surrogate": b"\x1a\x05\x0a\x03\xed\xa0\x80",
    "deep": b"\x1a\x7f" * 3,
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_bytes_that_are_no_message_are_an_invalid_argument(name, method):
    async def check():
        async with fronted(ScriptedService()) as world:
            open_call = world.channel.unary_stream if method == "Generate" else world.channel.unary_unary
            error = await refused(open_call(GENERATE + method)(GARBAGE[name]), grpc.StatusCode.INVALID_ARGUMENT)
            assert "GenerateRequest" in error.details() and not world.service.asked
            await world.stub.GenerateUnary(asked())

    run(check())


def test_no_message_at_all_is_an_empty_one():
    async def check():
        async with fronted(ScriptedService()) as world:
            await refused(world.channel.unary_unary(GENERATE + "GenerateUnary")(b""), grpc.StatusCode.INVALID_ARGUMENT)
            assert await world.channel.unary_unary(GENERATE + "ListModels")(b"")

    run(check())


@pytest.mark.parametrize(
    "method", [GENERATE + "Nothing", KSERVE + "Nothing", "/other.Service/Generate", "/", "/x" * 1000]
)
def test_a_method_that_is_none_is_unimplemented(method):
    async def check():
        async with fronted(ScriptedService()) as world:
            await refused(world.channel.unary_unary(method)(b"x"), grpc.StatusCode.UNIMPLEMENTED)

    run(check())


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "gzip"])
def test_a_message_above_the_limit_is_refused(compression):
    async def check():
        async with fronted(ScriptedService(), max_receive_message_bytes=100_000) as world:
            for size, code in [(200_000, grpc.StatusCode.RESOURCE_EXHAUSTED), (50_000, None)]:
                call = world.stub.GenerateUnary(asked("x" * size, max_tokens=1), compression=compression)
                if code is None:
                    await call
                else:
                    await refused(call, code)

    run(check())


def test_an_answer_above_the_limit_fails_and_the_next_call_works():
    async def check():
        async with fronted(ScriptedService(), max_send_message_bytes=10_000) as world:
            await refused(
                world.stub.GenerateUnary(asked("x" * 20_000, max_tokens_unlimited=True)),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            assert (await world.stub.GenerateUnary(asked("x"))).answers

    run(check())


def test_a_reader_that_is_slow_is_waited_for():
    async def check():
        service = ScriptedService(script=(*(Delta(0, "x" * 100_000) for _ in range(200)), *answer("b")))
        async with fronted(service) as world:
            call = world.stub.Generate(asked())
            await stalled(service)
            # What fits into windows and sockets is some MiB.
            assert service.num_pulled < 100
            assert len([one async for one in call]) == 202
            assert service.ended

    run(check())


def test_a_reader_that_never_reads_holds_nothing_after_it_goes():
    async def check():
        service = ScriptedService(script=tuple(Delta(0, "x" * 100_000) for _ in range(200)))
        async with fronted(service) as world:
            call = world.stub.Generate(asked(request_id="q"))
            await stalled(service)
            call.cancel()
            await service.until(lambda: service.cancelled == ["q"])

    run(check())


def test_two_hundred_streams_run_at_a_time():
    async def check():
        gate = asyncio.Event()
        service = ScriptedService(script=(Delta(0, "a"), gate, *answer("bcd")))
        async with fronted(service) as world:

            async def one(place):
                call = world.stub.Generate(asked(request_id=f"q{place}"))
                return "".join([response.delta.text async for response in call])

            tasks = [asyncio.create_task(one(place)) for place in range(200)]
            await service.until(lambda: service.num_pulled == 200)
            assert len(service.running) == 200
            gate.set()
            assert await asyncio.gather(*tasks) == ["abcd"] * 200
            assert not service.cancelled

    run(check())


def test_more_streams_than_a_connection_may_have_wait_for_their_turn():
    async def check():
        gate = asyncio.Event()
        service = ScriptedService(script=(gate, *answer("b")))
        async with fronted(service, max_concurrent_streams=2) as world:
            calls = [world.stub.GenerateUnary(asked(request_id=f"q{place}")) for place in range(5)]
            await service.until(lambda: len(service.running) == 2)
            gate.set()
            assert len([await call for call in calls]) == 5

    run(check())


def test_metadata_above_the_limit_is_refused_without_harm():
    async def check():
        async with fronted(ScriptedService()) as world:
            call = world.stub.GenerateUnary(asked(), metadata=(("baggage", "x" * 100_000),))
            await refused(call, grpc.StatusCode.RESOURCE_EXHAUSTED)
            await world.stub.GenerateUnary(asked())

    run(check())


def test_bytes_that_are_no_http_do_not_harm():
    async def check():
        async with fronted(ScriptedService()) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 10)
            await writer.drain()
            await reader.read()
            writer.close()
            await writer.wait_closed()
            assert (await world.stub.ListModels(pb.ListModelsRequest())).models

    run(check())
