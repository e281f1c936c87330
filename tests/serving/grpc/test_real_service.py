# SPDX-License-Identifier: Apache-2.0
"""The front over the real service and a tiny model: every method answers, every refusal names its field."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from metrale_jax import LLM
from serving.grpc.stubs import generate_pb2 as pb
from serving.grpc.stubs import open_inference_pb2
from tests.serving.grpc.fronts import asked, refused, run, started, world_of
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

TEXT = "The quick brown fox"
# Each program is compiled when it is first needed.
COMPILING_S = 200
PARAMS = {"max_tokens": 9, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=2, max_context_tokens=128, prefill_tokens=32, kv_cache_mib=1)


def scene(model, test) -> None:
    """Runs `test(world)` against a server that is quiet again afterwards."""

    async def whole():
        async with whole_server(model) as server, grpc.aio.insecure_channel(server.target) as channel:
            await test(world_of(None, server.front, channel))
            await server.quiet()

    run(whole(), COMPILING_S)


def inference(stream: bool, **parameters) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name="tiny")
    for name, datatype, field, value in [
        ("text_input", "BYTES", "bytes_contents", TEXT.encode()),
        ("stream", "BOOL", "bool_contents", stream),
        ("max_tokens", "INT32", "int_contents", PARAMS["max_tokens"]),
        ("temperature", "FP32", "fp32_contents", PARAMS["temperature"]),
        ("seed", "UINT64", "uint64_contents", PARAMS["seed"]),
    ]:
        given = request.inputs.add(name=name, datatype=datatype, shape=[1])
        getattr(given.contents, field).append(value)
    for name in ("text_output", "token_ids"):
        request.outputs.add(name=name)
    return request


def told(response: open_inference_pb2.ModelInferResponse) -> tuple[bytes, list[int]]:
    text, ids = response.outputs
    return text.contents.bytes_contents[0], list(ids.contents.int_contents)


def test_every_protocol_gives_the_same_tokens(model):
    async def check(world):
        (alone,) = (await world.stub.GenerateUnary(asked(TEXT, **PARAMS))).answers
        assert len(alone.token_ids) == 9
        whole = await world.kserve.ModelInfer(inference(stream=False))
        assert told(whole) == (alone.text.encode(), list(alone.token_ids))
        call = world.kserve.ModelStreamInfer()
        await call.write(inference(stream=True))
        await call.write(inference(stream=True))
        await call.done_writing()
        text, ids = b"", []
        while (response := await call.read()) is not grpc.aio.EOF:
            assert not response.error_message
            piece, new = told(response.infer_response)
            text, ids = text + piece, ids + new
        # Both are the same, and one may overtake the other.
        assert sorted(ids) == sorted(list(alone.token_ids) * 2) and len(text) == 2 * len(alone.text.encode())

    scene(model, check)


def test_every_method_of_one_answer_answers(model):
    async def check(world):
        prompt = pb.Prompt(text=TEXT)
        tokens = await world.stub.Tokenize(pb.TokenizeRequest(prompt=prompt))
        assert b"".join(tokens.tokens).decode().endswith("fox")
        text = await world.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=True))
        assert text.text.strip() == TEXT
        (own,) = (await world.stub.Score(pb.ScoreRequest(prompt=prompt, num_top=2))).scores
        assert list(own.token_ids) == list(tokens.token_ids)
        assert len(own.logprobs) == len(own.token_ids) - 1 and len(own.logprobs[0].top) == 2
        request = pb.ScoreRequest(prompt=prompt, continuations=[pb.Prompt(text=" jumps"), pb.Prompt(text=" over")])
        assert all(one.total_logprob < 0 for one in (await world.stub.Score(request)).scores)
        (card,) = (await world.stub.ListModels(pb.ListModelsRequest())).models
        assert card.id == "tiny" and card.has_chat_template

    scene(model, check)


def test_texts_become_vectors_of_length_one(model):
    async def check(world):
        inputs = [pb.Prompt(text=TEXT), pb.Prompt(text="a")]
        vectors = (await world.stub.Embed(pb.EmbedRequest(inputs=inputs))).embeddings
        (card,) = (await world.stub.ListModels(pb.ListModelsRequest())).models
        assert [len(one.values) for one in vectors] == [card.embedding_width] * 2
        assert sum(value * value for value in vectors[0].values) == pytest.approx(1.0, abs=1e-5)

    scene(model, check)


REFUSED = {
    "model": (pb.GenerateRequest(model="other", prompt=pb.Prompt(text="a")), grpc.StatusCode.NOT_FOUND),
    "prompt": (asked("word " * 2000), grpc.StatusCode.INVALID_ARGUMENT),
    "params.regex": (asked("a", regex="("), grpc.StatusCode.INVALID_ARGUMENT),
    "params.stop_token_ids": (asked("a", stop_token_ids=[10**9]), grpc.StatusCode.INVALID_ARGUMENT),
    "params.n": (asked("a", n=2**32 - 1), grpc.StatusCode.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_the_service_refuses_is_named_by_every_method(model, field):
    request, code = REFUSED[field]

    async def check(world):
        for method in ("GenerateUnary", "Generate"):
            call = getattr(world.stub, method)(request)
            await refused(call, code)
            (violation,) = [
                violation.field
                for detail in (await rpc_status.aio.from_call(call)).details
                if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
                for violation in error_details_pb2.BadRequest.FromString(detail.value).field_violations
            ]
            assert violation == field
        call = world.stub.GenerateStream()
        await call.write(pb.GenerateStreamRequest(generate=request))
        await call.write(started("a", "fine", max_tokens=2))
        await call.done_writing()
        ends = {}
        while (response := await call.read()) is not grpc.aio.EOF:
            ends[response.request_id] = response.failed.field
        assert sorted(ends.values()) == ["", field] and ends["fine"] == ""

    scene(model, check)
