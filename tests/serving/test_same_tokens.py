# SPDX-License-Identifier: Apache-2.0
"""One request gives one answer: by every method of the service, alone or among others, and through `LLM`."""

import asyncio

import pytest

from metrale_jax import LLM, SamplingParams
from serving.client import AsyncClient
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
REQUESTS = {
    "greedy": ("The quick brown fox jumps over the lazy dog", {"temperature": 0.0}),
    "sampled": ("Once upon a time", {"temperature": 0.8, "top_p": 0.9, "seed": 11}),
    "penalised": (
        CHAT,
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {65: 1.5}},
    ),
    "many": ([5, 6, 7, 8, 9], {"temperature": 1.0, "seed": 2**40 + 5, "n": 3}),
    "structured": ("A number: ", {"temperature": 0.9, "seed": 4, "regex": "[0-9]{3}-[a-f]+"}),
    "stopped": ("One two three", {"temperature": 0.0, "stop": ["j", "\x1c"], "min_p": 0.01}),
    "logprobs": ("abc", {"temperature": 0.5, "seed": 9, "logprobs": 3}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_chat(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(directory):
    """What each request gives alone through a model with all that is optional off."""
    llm = LLM(directory, max_sequences=4, max_context_tokens=256, prefix_cache=False)
    found = {}
    for name, (prompt, params) in REQUESTS.items():
        tokens = llm.chat_tokens(prompt) if prompt is CHAT else prompt
        found[name] = choices_of(llm.generate([tokens], SamplingParams(max_tokens=12, **params))[0])
    return found


def choices_of(result):
    return [(choice.text, tuple(choice.token_ids), choice.finish_reason) for choice in result.choices]


@pytest.fixture(scope="module")
def model(directory):
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


async def by_stream(client, prompt, params):
    texts, tokens = {}, {}
    async with client.stream(prompt, max_tokens=12, **params) as stream:
        async for piece in stream:
            texts[piece.index] = texts.get(piece.index, "") + piece
            tokens[piece.index] = (*tokens.get(piece.index, ()), *piece.token_ids)
    choices = choices_of(stream.result)
    for index, (text, token_ids, _) in enumerate(choices):
        assert texts.get(index, "") == text and tokens.get(index, ()) == token_ids
    return choices


async def by_unary(client, prompt, params):
    return choices_of(await client.generate(prompt, max_tokens=12, **params))


async def by_session(client, prompt, params):
    async with client.session() as session:
        running = [session.generate(prompt, max_tokens=12, **params) for _ in range(2)]
        one, two = await asyncio.gather(*running)
    assert choices_of(one) == choices_of(two)
    return choices_of(one)


async def by_fork(client, prompt, params):
    if params.get("n", 1) > 1:
        return None
    one, two = await client.fork(prompt, [{}, {"temperature": 0.0}], **{"max_tokens": 12, **params})
    return choices_of(one)[:1] if one.index == 0 else choices_of(two)[:1]


METHODS = {"stream": by_stream, "unary": by_unary, "session": by_session, "fork": by_fork}


def test_every_method_gives_the_tokens_of_the_request_alone(model, expected):
    async def scene():
        async with whole_server(model) as server, AsyncClient(server.target, timeout_s=60) as client:
            cells = [(name, method) for name in REQUESTS for method in METHODS]
            found = await asyncio.gather(*[METHODS[method](client, *REQUESTS[name]) for name, method in cells])
            again = await asyncio.gather(*[METHODS[method](client, *REQUESTS[name]) for name, method in cells])
            await server.quiet()
            return cells, found, again

    cells, found, again = asyncio.run(scene())
    wrong = [
        (name, method, have)
        for (name, method), *both in zip(cells, found, again, strict=True)
        for have in both
        if have is not None and have != expected[name]
    ]
    assert not wrong, wrong[:3]
    assert sum(have is not None for have in found) == 27
