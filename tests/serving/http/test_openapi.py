# SPDX-License-Identifier: Apache-2.0
"""What is served is described, and what is described is true."""

from dataclasses import fields

import jsonschema
import pytest

from metrale_jax.sampling.params import SamplingParams
from serving.http.schemas import PARAMS
from tests.serving.http.fronts import fronted, run
from tests.serving.scripted import ScriptedService, answer

BODIES = {
    "/v1/completions": {"prompt": ["a", [98]], "n": 2, "stop": "x", "logit_bias": {"3": 1}, "best_of": None},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 2},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [97]},
}
WRONG = {
    "/v1/completions": {"prompt": "a", "nonsense": 1},
    "/v1/chat/completions": {"messages": []},
    "/v1/embeddings": {"input": "a", "pooling": "max"},
    "/tokenize": {"prompt": 3},
    "/detokenize": {"tokens": [-1, "a"]},
}


def test_all_that_sampling_knows_is_described():
    assert set(PARAMS) == {field.name for field in fields(SamplingParams)}


def test_every_method_is_described_with_all_its_ends():
    async def act():
        async with fronted(ScriptedService(keys={})) as world:
            told = (await world.client.get("/openapi.json")).json()
            assert told["openapi"].startswith("3.1") and set(BODIES) < set(told["paths"])
            assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}"} < set(told["paths"])
            for path, methods in told["paths"].items():
                for method, one in methods.items():
                    answer = await world.client.request(method, path)
                    assert str(answer.status_code) in one["responses"], (path, method, answer.status_code)
                    assert answer.status_code == 401 or one.get("security") == []

    run(act())


@pytest.mark.parametrize("path", BODIES)
def test_bodies_and_answers_are_as_described(path):
    async def act():
        async with fronted(ScriptedService()) as world:
            one = (await world.client.get("/openapi.json")).json()["paths"][path]["post"]
            body = jsonschema.Draft202012Validator(one["requestBody"]["content"]["application/json"]["schema"])
            body.validate(BODIES[path])
            assert not body.is_valid(WRONG[path])
            for given, status in ((BODIES[path], 200), (WRONG[path], 400)):
                answer = await world.client.post(path, json=given)
                assert answer.status_code == status, answer.text
                content = one["responses"][str(status)]["content"]["application/json"]
                jsonschema.validate(answer.json(), content["schema"], jsonschema.Draft202012Validator)

    run(act())


def test_tools_and_calls_are_described():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "b"}]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def act():
        async with fronted(
            ScriptedService(answer('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'))
        ) as world:
            told = (await world.client.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]["post"]
            body = {"messages": messages, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            jsonschema.validate(body, told["requestBody"]["content"]["application/json"]["schema"])
            found = (await world.client.post("/v1/chat/completions", json=body)).json()
            assert found["choices"][0]["finish_reason"] == "tool_calls"
            jsonschema.validate(found, told["responses"]["200"]["content"]["application/json"]["schema"])

    run(act())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_errors_are_described_in_the_form_of_their_api(path):
    async def act():
        async with fronted(ScriptedService()) as world:
            one = (await world.client.get("/openapi.json")).json()["paths"][path]["post"]
            answered = await world.client.post(path, json={"nonsense": 1})
            assert answered.status_code == 400
            jsonschema.validate(answered.json(), one["responses"]["400"]["content"]["application/json"]["schema"])

    run(act())
