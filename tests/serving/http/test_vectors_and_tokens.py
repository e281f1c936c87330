# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, /tokenize and /detokenize over a service that does as it is told."""

import base64
import math
import struct

import pytest

from serving.core.errors import Kind, ServiceError
from tests.serving.chat.models import TEMPLATES, TOOLS, chat_model
from tests.serving.http.fronts import error_of, fronted, run
from tests.serving.scripted import ScriptedService

EMBED = "/v1/embeddings"


@pytest.mark.parametrize("given", ["abc", list(b"abc"), ["abc"], [list(b"abc")]])
def test_a_vector_has_openais_shape(given):
    async def act():
        async with fronted(ScriptedService()) as world:
            body = (await world.client.post(EMBED, json={"model": "scripted", "input": given})).json()
            [one] = body["data"]
            length = math.hypot(3.0, 1.0, 2.0, 2.0)
            assert one["embedding"] == pytest.approx([value / length for value in (3.0, 1.0, 2.0, 2.0)])
            assert (one["object"], one["index"], body["object"], body["model"]) == ("embedding", 0, "list", "scripted")
            assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}

    run(act())


def test_vectors_come_in_base64_cut_and_of_length_one_as_asked():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            asked = {"input": ["a", "bc"], "encoding_format": "base64", "dimensions": 2, "pooling": "last"}
            found = (await world.client.post(EMBED, json=asked)).json()["data"]
            vectors = [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in found]
            for vector, ratio in zip(vectors, (1.0, 2.0), strict=True):
                assert math.hypot(*vector) == pytest.approx(1.0) and vector[0] / vector[1] == pytest.approx(ratio)
            assert service.asked[0][1].pooling == "last"
            plain = (await world.client.post(EMBED, json={"input": "a", "dimensions": 2, "normalize": False})).json()
            assert plain["data"][0]["embedding"] == [1.0, 1.0]

    run(act())


@pytest.mark.parametrize(
    "url, body, param",
    [
        (EMBED, {}, "input"),
        (EMBED, {"input": {"a": 1}}, "input"),
        (EMBED, {"input": ["a", 1]}, "input"),
        (EMBED, {"input": "a", "dimensions": 5}, "dimensions"),
        (EMBED, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EMBED, {"input": "a", "encoding_format": []}, "encoding_format"),
        (EMBED, {"input": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "any"}, "tool_choice"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(url, body, param):
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            assert error_of(await world.client.post(url, json=body), 400)["param"] == param and not service.asked

    run(act())


@pytest.mark.parametrize(
    "url, body, told, param",
    [
        (EMBED, {"input": "a"}, "inputs[0]", "input[0]"),
        ("/tokenize", {"prompt": "a"}, "prompt", "prompt"),
        ("/detokenize", {"tokens": [1]}, "token_ids", "tokens"),
    ],
)
def test_errors_of_the_service_name_fields_of_the_body(url, body, told, param):
    async def act():
        service = ScriptedService()
        service.failure = ServiceError(Kind.INVALID, "no.", field=told)
        async with fronted(service) as world:
            assert error_of(await world.client.post(url, json=body), 400)["param"] == param

    run(act())


def test_texts_and_chats_become_tokens_and_tokens_texts():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            told = (await world.client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
            assert told == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": ["a", "b"]}
            chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
            told = (await world.client.post("/tokenize", json=chat)).json()
            assert bytes(told["tokens"]).decode() == "user:a\n" and told["token_strs"] is None
            assert service.asked[-1][1].prompt.template == {"add_generation_prompt": False}
            told = (await world.client.post("/detokenize", json={"tokens": [97, 98]})).json()
            assert told == {"prompt": "ab"}

    run(act())


def test_a_chat_with_tools_becomes_tokens_as_the_model_is_told_it():
    async def act():
        asked = ScriptedService()
        asked.chat = chat_model(TEMPLATES["hermes"])
        called = {"id": "a", "type": "function", "function": {"name": "sum", "arguments": '{"of": [1]}'}}
        chat = {
            "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "tool_calls": [called]}],
            "tools": TOOLS,
            "add_generation_prompt": False,
        }
        async with fronted(asked) as world:
            answer = await world.client.post("/tokenize", json=chat)
            assert answer.status_code == 200, answer.text
            error_of(await world.client.post("/tokenize", json=chat | {"tools": [5]}), 400)
        prompt = asked.asked[0][1].prompt
        assert prompt.template == {"add_generation_prompt": False, "tools": TOOLS}
        assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"of": [1]}

    run(act())
