# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against a whole server over a tiny model: the tokens are those that the request has alone."""

import asyncio
import base64
import json

import numpy as np
import openai
import pytest

from metrale_jax import LLM, SamplingParams
from serving.core.keys import KeyLimits, KeyRing
from tests.serving.http.fronts import run
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

# Each program is compiled when it is first needed.
COMPILING_S = 300
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
TEXT = "The quick brown fox jumps over the lazy dog"
OWN = ("repetition_penalty", "min_p", "top_k", "regex", "stop_token_ids")
REQUESTS = {
    "greedy": (TEXT, {"temperature": 0.0}),
    "sampled": ("Once upon a time", {"temperature": 0.8, "top_p": 0.9, "seed": 11, "top_k": 40}),
    "penalised": (CHAT, {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "logit_bias": {"65": 1.5}}),
    "chatted": (CHAT, {"temperature": 0.9, "seed": 8, "n": 2}),
    "many": ([5, 6, 7, 8, 9], {"temperature": 1.0, "seed": 2**40 + 5, "n": 3}),
    "structured": ("A number: ", {"temperature": 0.9, "seed": 4, "regex": "[0-9]{3}-[a-f]+"}),
    "stopped": ("One two three", {"temperature": 0.0, "stop": ["j", "\x1c"], "min_p": 0.01}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_chat(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(directory):
    """The model with all that is optional off, one request at a time."""
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefix_cache=False)


@pytest.fixture(scope="module")
def model(directory):
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


def scene(model, test, **options) -> None:
    """Runs `test(client, server)` against a server that is quiet again afterwards."""

    async def whole():
        async with whole_server(model, **options) as server:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                await test(client, server)
            await server.quiet()

    run(whole(), COMPILING_S)


def choices_of(result):
    return [(choice.text, list(choice.token_ids), choice.finish_reason) for choice in result.choices]


def asked_of(client, prompt, params):
    """The method and its arguments."""
    own = {name: value for name, value in params.items() if name in OWN}
    known = {name: value for name, value in params.items() if name not in OWN}
    more = {"model": "tiny", "max_tokens": 12, "extra_body": own | {"return_token_ids": True}, **known}
    if prompt is CHAT:
        return client.chat.completions, {"messages": prompt} | more
    return client.completions, {"prompt": prompt} | more


async def whole(client, prompt, params):
    method, asked = asked_of(client, prompt, params)
    answer = await method.create(**asked)
    texts = [choice.message.content if prompt is CHAT else choice.text for choice in answer.choices]
    pairs = zip(texts, answer.choices, strict=True)
    return [(text, choice.token_ids, choice.finish_reason) for text, choice in pairs]


async def streamed(client, prompt, params):
    method, asked = asked_of(client, prompt, params)
    found = {index: ["", [], None] for index in range(params.get("n", 1))}
    stream = await method.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        for choice in chunk.choices:
            text, ids, reason = found[choice.index]
            new = (choice.delta.content or "") if prompt is CHAT else choice.text
            found[choice.index] = [text + new, ids + (choice.token_ids or []), choice.finish_reason or reason]
    assert chunk.usage.completion_tokens == sum(len(ids) for _, ids, _ in found.values())
    return [tuple(found[index]) for index in sorted(found)]


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_are_those_that_a_request_has_alone(name, model, alone):
    prompt, params = REQUESTS[name]
    tokens = alone.chat_tokens(prompt) if prompt is CHAT else prompt
    expected = choices_of(alone.generate([tokens], SamplingParams(max_tokens=12, **params))[0])

    async def check(client, server):
        others = [asyncio.create_task(whole(client, "Some other text " * place, {"seed": place})) for place in (1, 2)]
        got = await asyncio.gather(*(way(client, prompt, params) for way in (whole, streamed, whole)))
        assert got == [expected] * 3
        await asyncio.gather(*others)

    scene(model, check)


def test_a_prompt_is_scored_as_evaluation_harnesses_ask_for_it(model, alone):
    prompts = [list(range(40, 60)), list(range(70, 80))]

    async def check(client, server):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        expected = [alone.generate([prompt], params)[0].prompt_logprobs for prompt in prompts]
        for max_tokens in (0, 1):
            answer = await client.completions.create(
                model="tiny", prompt=prompts, echo=True, max_tokens=max_tokens, logprobs=1, temperature=0, seed=1234
            )
            for place, choice in enumerate(answer.choices):
                told, own = choice.logprobs, expected[place]
                num_tokens = len(prompts[place])
                assert choice.index == place and len(told.tokens) == num_tokens + max_tokens
                assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
                assert told.token_logprobs[1:num_tokens] == pytest.approx([one.logprob for one in own], abs=1e-5)
                greedy = [one.token_id == one.top[0][0] for one in own]
                pairs = zip(told.token_logprobs[1:num_tokens], told.top_logprobs[1:num_tokens], strict=True)
                assert [logprob == max(top.values()) for logprob, top in pairs] == greedy

    scene(model, check)


def test_vectors_are_the_models_own(model, alone):
    inputs = [TEXT, "a"]

    async def check(client, server):
        expected = np.stack(alone.embed(inputs))
        # The client asks for base64 and decodes it where nothing is said.
        for more in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model="tiny", input=inputs, **more)
            np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-5)
        ids = [alone.tokenize(text) for text in inputs]
        answer = await client.embeddings.create(model="tiny", input=ids, dimensions=8, encoding_format="base64")
        short = np.stack([np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in answer.data])
        cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(short, cut, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, ids))

    scene(model, check)


def test_tokens_go_there_and_back(model, alone):
    async def check(client, server):
        told = await client.post("/../tokenize", body={"prompt": TEXT, "return_token_strs": True}, cast_to=object)
        assert told["tokens"] == alone.tokenize(TEXT) and "".join(told["token_strs"]).endswith("dog")
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 256)
        chat = await client.post("/../tokenize", body={"messages": CHAT}, cast_to=object)
        assert chat["tokens"] == alone.chat_tokens(CHAT)
        back = await client.post(
            "/../detokenize", body={"tokens": told["tokens"], "skip_special_tokens": True}, cast_to=object
        )
        assert back["prompt"].strip() == TEXT

    scene(model, check)


def test_who_leaves_frees_what_they_held(model):
    async def check(client, server):
        endless = {"model": "tiny", "max_tokens": 240, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(prompt="a", stream=True, n=2, **endless)
        await anext(aiter(stream))
        await stream.close()
        await server.quiet()
        waiting = asyncio.create_task(client.completions.create(prompt=["a", "b"], **endless))
        while server.service.num_calls < 2:
            await asyncio.sleep(0.002)
        waiting.cancel()
        await server.quiet()
        assert [record.outcome for record in server.records] == ["cancelled"] * 3
        assert all(record.generated_tokens < 2 * 240 for record in server.records)

    scene(model, check)


REFUSED = [
    ({"model": "other"}, openai.NotFoundError, "model"),
    ({"prompt": "word " * 2000}, openai.BadRequestError, "prompt"),
    ({"prompt": []}, openai.BadRequestError, "prompt"),
    ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
    ({"prompt": [10**30]}, openai.BadRequestError, "prompt"),
    ({"prompt": [-1]}, openai.BadRequestError, "prompt"),
    ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias"),
    ({"extra_body": {"regex": "("}}, openai.BadRequestError, "regex"),
    ({"extra_body": {"stop_token_ids": [10**9]}}, openai.BadRequestError, "stop_token_ids"),
    ({"timeout": 100, "extra_headers": {"X-Request-Timeout": "0.000001"}}, openai.APIStatusError, None),
]


@pytest.mark.parametrize("more, kind, param", REFUSED)
def test_what_is_refused_is_an_error_of_its_class_that_names_the_field(more, kind, param, model):
    async def check(client, server):
        for stream in (False, True):
            with pytest.raises(kind) as told:
                await client.completions.create(**{"model": "tiny", "prompt": "a", "stream": stream} | more)
            assert told.value.param == param and told.value.request_id
            assert json.loads(told.value.response.text)["error"]["message"]

    scene(model, check)


def test_keys_and_their_limits_are_errors_of_their_classes(model, tmp_path):
    token = "alice-0123456789-secret"
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "alice"\ntoken = "{token}"\nrequests_per_minute = 1\n')
    path.chmod(0o600)

    async def check(client, server):
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="tiny", prompt="a")
        known = client.with_options(api_key=token)
        assert [one.id async for one in known.models.list()] == ["tiny"]
        assert (await known.models.retrieve("tiny")).max_model_len == 256
        await known.completions.create(model="tiny", prompt="a", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as told:
            await known.completions.create(model="tiny", prompt="a")
        assert 0 < int(told.value.response.headers["retry-after"]) <= 60
        assert [(record.outcome, record.key_id) for record in server.records] == [
            ("unauthenticated", ""),
            ("ok", "alice"),
            ("exhausted", "alice"),
        ]

    scene(model, check, keys=KeyRing.open(path))


def test_all_without_a_key_share_their_limit(model):
    async def check(client, server):
        stream = await client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=200)
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=CHAT)
        await stream.close()

    scene(model, check, keys=KeyRing.anonymous(KeyLimits(max_concurrent=1)))


def test_a_client_that_waits_no_longer_frees_what_it_held(model):
    async def check(client, server):
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model="tiny", prompt="a", n=4, max_tokens=240, timeout=0.05, extra_body={"ignore_eos": True}
            )
        await server.quiet()
        assert server.records[0].outcome == "cancelled"

    scene(model, check)
