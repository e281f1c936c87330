# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol as Triton's own client sees it, and as typed contents carry it."""

import asyncio
import json
import sys
from pathlib import Path

import grpc
import pytest

from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.grpc.kserve import SERVICE, UNSERVED
from serving.grpc.kserve_calls import LISTS, PARAMETERS
from serving.grpc.stubs import open_inference_pb2 as pb
from tests.serving.grpc.fronts import fronted, refused, run, stalled
from tests.serving.scripted import ScriptedService, answer

CLIENT = Path(__file__).parent / "triton_client.py"
FIELDS = {"BYTES": "bytes_contents", "INT32": "int_contents", "FP32": "fp32_contents", "BOOL": "bool_contents"}


@pytest.fixture(scope="module")
def told():
    """What Triton's client printed, and beside it what the service was asked, by request id."""
    found = {}

    async def ask():
        service = ScriptedService()
        async with fronted(service, version="9.9") as world:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(CLIENT), str(world.front.port), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            found.update(json.loads(out), asked=[call for _, call, _ in service.asked])

    run(ask())
    return found


def test_the_server_lives_and_its_model_is_ready(told):
    about = told["about"]
    assert (about["live"], about["ready"], about["model_ready"]) == (True, True, [True, True, False, False])
    assert (about["server"]["name"], about["server"]["version"]) == ("metrale-jax", "9.9")
    assert about["index"]["models"] == [{"name": "scripted", "version": "1", "state": "READY"}]


def test_the_model_says_what_it_takes_and_gives(told):
    metadata = told["about"]["metadata"]
    inputs = {one["name"]: one["datatype"] for one in metadata["inputs"]}
    assert inputs["text_input"] == "BYTES" and inputs["max_tokens"] == "INT32" and inputs["temperature"] == "FP32"
    assert [one["name"] for one in metadata["outputs"]] == ["text_output", "token_ids", "finish_reason"]
    assert told["about"]["config"] == ["scripted", True, ["text_input"]]
    assert told["about"]["types"]["seed"] == "TYPE_UINT64" and told["about"]["types"]["stop"] == "TYPE_STRING"


def test_what_is_not_served_says_why(told):
    about = told["about"]
    assert about["unknown"][0] == "StatusCode.NOT_FOUND" and "scripted" in about["unknown"][1]
    for name, word in [("load", "start it with others"), ("memory", "Shared memory"), ("trace", "settings")]:
        assert about[name][0] == "StatusCode.UNIMPLEMENTED" and word in about[name][1]


def test_an_answer_comes_back_with_its_id(told):
    whole = {"text_output": ["hello world"], "id": "q1", "model": "scripted"}
    assert told["answers"]["plain"] == whole
    assert told["answers"]["asynchronous"] == [{**whole, "id": ""}, None]


def test_outputs_come_when_asked_for_by_name(told):
    expected = {"text_output": ["hello"], "token_ids": list(b"hello"), "finish_reason": ["length"]}
    assert {name: told["answers"]["all"][name] for name in expected} == expected


def test_answers_have_the_shape_of_the_texts(told):
    answers = told["answers"]
    assert answers["square"]["text_output"] == [["abc"]]
    assert answers["batch"]["text_output"] == ["a", "bb", "c"]
    assert answers["several"]["text_output"] == [["a", "a"], ["b", "b"]]


def test_parameters_come_by_each_of_their_ways(told):
    assert told["answers"]["json"]["text_output"] == ["hel"]
    assert told["answers"]["parameters"]["text_output"] == ["he"]
    params = [call.params for call in told["asked"]]
    assert SamplingParams(max_tokens=5, temperature=0.7) in params, "0.7 as float32 is 0.7 again"
    assert SamplingParams(max_tokens=3, stop=("x",)) in params
    assert SamplingParams(max_tokens=2, temperature=0.3, priority=4) in params
    (limited,) = [call for call in told["asked"] if call.info.timeout_s is not None]
    assert limited.info.timeout_s == 9.0


def test_what_is_wrong_is_an_invalid_argument(told):
    for name, word in [("bad", "top_p"), ("no_model", "text_input"), ("streaming", "ModelStreamInfer")]:
        status, message = told["answers"][name]
        assert status == "StatusCode.INVALID_ARGUMENT" and word in message


def test_a_stream_gives_pieces_and_marks_the_last(told):
    pieces = told["streamed"]["s"]
    assert [piece["text_output"] for piece, _ in pieces] == [[letter] for letter in "stream"] + [[""]]
    assert [piece["token_ids"] for piece, _ in pieces] == [[ord(letter)] for letter in "stream"] + [[]]
    assert [piece["finish_reason"] for piece, _ in pieces] == [[""]] * 6 + [["stop"]]
    assert [last for _, last in pieces] == [False] * 6 + [True]


def test_a_stream_goes_on_beside_a_failure_and_gives_whole_answers_too(told):
    assert told["streamed"]["bad"] == ["text_input is an empty text; give at least one character."]
    ((whole, last),) = told["streamed"]["w"]
    assert whole["text_output"] == ["whole"] and last


def test_inferences_are_counted(told):
    (stats,) = told["statistics"]["model_stats"]
    assert int(stats["execution_count"]) == int(stats["inference_stats"]["success"]["count"]) == 10
    assert int(stats["inference_count"]) == 13


def test_our_messages_are_those_of_triton_on_the_wire(told):
    theirs = told["proto"]["fields"]
    ours = fields_of(pb.DESCRIPTOR.message_types_by_name.values())
    assert {name: theirs.get(name) for name in ours} == ours and len(ours) > 60
    methods = told["proto"]["methods"]
    assert {*methods} == {*SERVICE.methods_by_name, *UNSERVED}
    for method in SERVICE.methods:
        kinds = [method.client_streaming, method.server_streaming]
        assert methods[method.name] == [method.input_type.full_name, method.output_type.full_name, *kinds]
    assert told["proto"]["types"] == {value.name: value.number for value in pb.DataType.DESCRIPTOR.values}


def fields_of(messages) -> dict[str, list]:
    found = {}
    for message in messages:
        for field in message.fields:
            kind = field.message_type or field.enum_type
            found[f"{message.full_name}.{field.name}"] = [
                field.number,
                field.type,
                field.is_repeated,
                kind.full_name if kind else "",
                field.containing_oneof.name if field.containing_oneof else "",
            ]
        found.update(fields_of(message.nested_types))
    return found


def test_every_parameter_but_log_probabilities_has_a_way_in():
    missing = set(SamplingParams.__dataclass_fields__) - {*PARAMETERS, *LISTS}
    assert missing == {"logprobs", "prompt_logprobs", "logit_bias"}, "the last comes in sampling_parameters"


def tensor(name, *values, datatype="BYTES", shape=None):
    contents = pb.InferTensorContents(**{FIELDS[datatype]: values})
    return pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=[len(values)] if shape is None else shape, contents=contents
    )


def asked(*inputs, outputs=(), **fields):
    wanted = [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs]
    return pb.ModelInferRequest(model_name="scripted", inputs=inputs, outputs=wanted, **fields)


TEXT = tensor("text_input", b"abc")


def test_typed_contents_are_answered_in_kind():
    async def check():
        async with fronted(ScriptedService()) as world:
            request = asked(TEXT, tensor("max_tokens", 2, datatype="INT32"), outputs=("token_ids", "text_output"))
            response = await world.kserve.ModelInfer(request)
            assert not response.raw_output_contents
            ids, text = response.outputs
            assert list(ids.contents.int_contents) == [97, 98] and list(ids.shape) == [2]
            assert list(text.contents.bytes_contents) == [b"ab"] and text.datatype == "BYTES"

    run(check())


def test_all_that_json_can_say_arrives():
    async def check():
        async with fronted(ScriptedService()) as world:
            given = (
                '{"logit_bias": {"5": 1.5}, "bad_words": ["no", [1, 2]], "seed": 3, "json_schema": {"type": "object"}}'
            )
            await world.kserve.ModelInfer(asked(TEXT, tensor("sampling_parameters", given.encode())))
            assert world.service.asked[0][1].params == SamplingParams(
                logit_bias={5: 1.5}, bad_words=["no", [1, 2]], seed=3, json_schema={"type": "object"}
            )

    run(check())


def test_lists_and_the_prompt_before_the_answer_are_inputs_too():
    async def check():
        async with fronted(ScriptedService()) as world:
            inputs = (tensor("stop", b"x", b"y"), tensor("exclude_input_in_output", False, datatype="BOOL"))
            await world.kserve.ModelInfer(asked(TEXT, *inputs))
            assert world.service.asked[0][1].params == SamplingParams(stop=("x", "y"), echo=True)

    run(check())


def raw(*contents, **fields):
    request = asked(TEXT, tensor("max_tokens", datatype="INT32", shape=[1]), **fields)
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.extend(contents)
    return request


COUNT, TWO_TEXTS = b"\x02\0\0\0", tensor("text_input", b"a", b"b")
WRONG = {
    "text_input": [
        asked(),
        asked(tensor("text_input")),
        asked(tensor("text_input", b"")),
        asked(tensor("text_input", b"\xff")),
        asked(tensor("text_input", b"a", shape=[2])),
        asked(tensor("text_input", b"a", shape=[-1, -1])),
        asked(tensor("text_input", 1, datatype="INT32")),
        asked(TEXT, TEXT),
        raw(b"\x03\0\0\0ab", COUNT),
        raw(b"\x03\0", COUNT),
        raw(b"\xff\xff\xff\xffab", COUNT),
    ],
    "raw_input_contents": [raw(b"\x03\0\0\0abc")],
    "max_tokens": [raw(b"\x03\0\0\0abc", b"\x02\0\0"), asked(TEXT, tensor("max_tokens", 1, 2, datatype="INT32"))],
    "n": [asked(TWO_TEXTS, tensor("n", 1, 2, datatype="INT32"))],
    "nothing": [asked(TEXT, tensor("nothing", 1, datatype="INT32"))],
    "temperature": [
        asked(
            TEXT,
            tensor("temperature", 1.0, datatype="FP32"),
            tensor("sampling_parameters", b'{"temperature": 0}'),
        )
    ],
    "sampling_parameters": [asked(TEXT, tensor("sampling_parameters", text)) for text in (b"{", b"[]", b"[" * 100_000)],
    "sampling_parameters.logprobs": [asked(TEXT, tensor("sampling_parameters", b'{"logprobs": 2}'))],
    "outputs.logits": [asked(TEXT, outputs=("logits",))],
    "token_ids": [asked(TWO_TEXTS, outputs=("token_ids",))],
    "parameters.sequence_id": [asked(TEXT, parameters={"sequence_id": pb.InferParameter(int64_param=1)})],
    "parameters.max_tokens": [asked(TEXT, parameters={"max_tokens": pb.InferParameter()})],
    "parameters.temperature": [asked(TEXT, parameters={"temperature": pb.InferParameter(string_param="warm")})],
    "parameters.timeout": [asked(TEXT, parameters={"timeout": pb.InferParameter(int64_param=-1)})],
    "id": [asked(TEXT, id="a b")],
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_named(field):
    async def check():
        async with fronted(ScriptedService()) as world:
            for request in WRONG[field]:
                error = await refused(world.kserve.ModelInfer(request), grpc.StatusCode.INVALID_ARGUMENT)
                assert error.details().startswith(field), error.details()
            assert not world.service.asked

    run(check())


def test_a_version_that_is_none_is_not_found():
    async def check():
        async with fronted(ScriptedService()) as world:
            await refused(world.kserve.ModelInfer(asked(TEXT, model_version="7")), grpc.StatusCode.NOT_FOUND)

    run(check())


def test_an_error_of_one_text_ends_the_others_and_is_the_answer():
    async def check():
        service = ScriptedService()
        service.scripts = {
            "q-0": (Delta(0, "a"), asyncio.Event()),
            "q-1": (ServiceError(Kind.EXHAUSTED, "Too many.", retry_after_s=1),),
        }
        async with fronted(service) as world:
            error = await refused(world.kserve.ModelInfer(asked(TWO_TEXTS, id="q")), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert error.details() == "Too many." and service.cancelled == ["q-0"]

    run(check())


def test_what_nobody_foresaw_is_not_told_on_a_stream():
    async def check():
        async with fronted(ScriptedService(script=(KeyError("secret"),))) as world:
            call = world.kserve.ModelStreamInfer()
            await call.write(asked(TEXT, id="q"))
            response = await call.read()
            assert "incident" in response.error_message and "secret" not in response.error_message
            assert response.infer_response.id == "q"

    run(check())


def test_a_client_that_goes_away_ends_all_its_inferences():
    async def check():
        script = (Delta(0, "a"), asyncio.Event(), *answer("b"))
        async with fronted(ScriptedService(script=script)) as world:
            call = world.kserve.ModelStreamInfer()
            # Clients may use an id twice.
            await call.write(asked(TEXT, tensor("stream", True, datatype="BOOL"), id="q"))
            await call.write(asked(TWO_TEXTS, id="q"))
            await world.service.until(lambda: len(world.service.running) == 3)
            call.cancel()
            await world.service.until(lambda: len(world.service.cancelled) == 3)

    run(check())


def test_a_slow_reader_of_pieces_is_waited_for():
    async def check():
        service = ScriptedService(script=(*(Delta(0, "x" * 100_000) for _ in range(200)), *answer("b")))
        async with fronted(service) as world:
            call = world.kserve.ModelStreamInfer()
            await call.write(asked(TEXT, tensor("stream", True, datatype="BOOL")))
            await stalled(service)
            assert service.num_pulled < 100
            call.cancel()
            await service.until(lambda: len(service.cancelled) == 1)

    run(check())


def test_only_whether_it_lives_is_told_to_anybody():
    async def check():
        service = ScriptedService(keys={"secret": Caller("k")})
        async with fronted(service) as world:
            kserve = world.kserve
            assert (await kserve.ServerLive(pb.ServerLiveRequest())).live
            assert (await kserve.ServerReady(pb.ServerReadyRequest())).ready
            assert (await kserve.ServerMetadata(pb.ServerMetadataRequest())).name
            for method, request in [
                ("ModelReady", pb.ModelReadyRequest(name="scripted")),
                ("ModelMetadata", pb.ModelMetadataRequest(name="scripted")),
                ("ModelConfig", pb.ModelConfigRequest(name="scripted")),
                ("ModelStatistics", pb.ModelStatisticsRequest()),
                ("RepositoryIndex", pb.RepositoryIndexRequest()),
                ("ModelInfer", asked(TEXT)),
            ]:
                await refused(getattr(kserve, method)(request), grpc.StatusCode.UNAUTHENTICATED)
            await refused(kserve.ModelStreamInfer(), grpc.StatusCode.UNAUTHENTICATED)
            allowed = await kserve.ModelInfer(asked(TEXT), metadata=(("authorization", "Bearer secret"),))
            assert allowed.outputs and service.asked[0][2].key_id == "k"

    run(check())


def test_a_server_that_does_not_serve_is_not_ready():
    async def check():
        async with fronted(ScriptedService()) as world:
            world.front.set_serving(False)
            assert not (await world.kserve.ServerReady(pb.ServerReadyRequest())).ready
            assert not (await world.kserve.ModelReady(pb.ModelReadyRequest(name="scripted"))).ready
            assert (await world.kserve.ServerLive(pb.ServerLiveRequest())).live

    run(check())
