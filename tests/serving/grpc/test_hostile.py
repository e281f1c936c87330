# SPDX-License-Identifier: Apache-2.0
"""Clients that send garbage, too much, or do not read."""

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.calls import CallInfo
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.grpc import conversion_calls
from serving.grpc.kserve_calls import inference_of
from serving.grpc.methods import parsed
from serving.grpc.stubs import generate_pb2 as pb
from serving.grpc.stubs import open_inference_pb2
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


def test_more_calls_than_a_connection_may_have_do_not_run():
    async def check():
        service = ScriptedService(script=(asyncio.Event(),))
        async with fronted(service, max_concurrent_streams=2) as world:
            # With its answer comes what the server allows.
            await world.stub.ListModels(pb.ListModelsRequest())
            calls = [world.stub.GenerateUnary(asked()) for _ in range(5)]
            await service.until(lambda: len(service.running) == 2)
            await asyncio.sleep(0.1)
            assert len(service.asked) == 2
            for call in calls:
                call.cancel()

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


def test_a_client_that_pings_too_often_is_sent_away():
    async def check():
        async with fronted(ScriptedService(), min_ping_interval_s=60) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            preface, no_settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\x04\0\0\0\0\0"
            writer.write(preface + no_settings + b"\0\0\x08\x06\0\0\0\0\0pingping" * 20)
            frames = await reader.read()
            # GOAWAY names its error, 11 for a client that shall calm down, and says why.
            assert b"\0\0\0\x0b" in frames and b"too_many_pings" in frames
            writer.close()
            await writer.wait_closed()

    run(check())


def rich_prompt() -> pb.Prompt:
    message = pb.Message(role="user", content="hi", name="ann")
    message.extra.update({"a": [1.5, None, {"b": True}]})
    return pb.Prompt(chat=pb.Chat(messages=[message, message], add_generation_prompt=False))


RICH_PARAMS = pb.SamplingParams(
    n=1,
    temperature=0.7,
    logit_bias={5: 1.5},
    allowed_token_ids=pb.TokenIds(ids=[1, 300]),
    bad_words=[pb.BadWord(text="no"), pb.BadWord(token_ids=pb.TokenIds(ids=[7]))],
    stop=["END"],
    json_schema='{"type": "object"}',
    early_stopping=pb.EARLY_STOPPING_NEVER,
    deadline_s=3.5,
)
RICH_INFERENCE = open_inference_pb2.ModelInferRequest(
    model_name="m",
    id="q",
    parameters={"max_tokens": open_inference_pb2.InferParameter(int64_param=3)},
    inputs=[
        open_inference_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1])
        for name, datatype in [("text_input", "BYTES"), ("temperature", "FP32"), ("stream", "BOOL")]
    ],
    outputs=[open_inference_pb2.ModelInferRequest.InferRequestedOutputTensor(name="token_ids")],
    raw_input_contents=[b"\x02\0\0\0hi", b"\0\0\x80?", b"\x01"],
)
BRANCH = pb.Branch(continuation=pb.Prompt(text=" x"), params=RICH_PARAMS)
CONVERSIONS = {
    "generate": (conversion_calls.generate_call, pb.GenerateRequest(prompt=rich_prompt(), params=RICH_PARAMS)),
    "fork": (conversion_calls.fork_call, pb.ForkRequest(prompt=rich_prompt(), branches=[BRANCH])),
    "score": (conversion_calls.score_call, pb.ScoreRequest(prompt=rich_prompt(), continuations=[pb.Prompt(text="a")])),
    "embed": (conversion_calls.embed_call, pb.EmbedRequest(inputs=[rich_prompt()], pooling=pb.POOLING_LAST)),
    "kserve": (inference_of, RICH_INFERENCE),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_whatever_bytes_come_they_are_a_call_or_an_invalid_argument(name):
    convert, whole = CONVERSIONS[name]
    encoded = whole.SerializeToString()
    assert convert(parsed(type(whole), encoded), CallInfo())

    @settings(deadline=None, max_examples=150)
    @given(st.data())
    def check(data):
        changed = bytearray(encoded)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(changed)) | st.none())
        try:
            convert(parsed(type(whole), bytes(changed[:cut])), CallInfo())
        except ServiceError as error:
            assert error.kind is Kind.INVALID

    check()
