# SPDX-License-Identifier: Apache-2.0
"""OpenAI bodies as prompts and sampling parameters."""

from dataclasses import fields

import jax.numpy as jnp
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.transforms import filter_bound
from serving.openai_body import _format_fields, chat_request, completion_request
from serving.passed_over import LEAST_TOP_P

HELLO = [{"role": "user", "content": "hello"}]
KNOWN = {field.name for field in fields(SamplingParams)}


def chat(**body):
    return chat_request({"messages": HELLO, **body}, {})


def test_a_chat_runs_to_the_end_of_the_context_unless_it_is_told_otherwise():
    assert chat() == (HELLO, SamplingParams(max_tokens=None))
    assert chat(max_tokens=3)[1].max_tokens == chat(max_completion_tokens=3)[1].max_tokens == 3
    assert chat_request({"messages": HELLO}, {"max_tokens": 5})[1].max_tokens == 5


def test_fields_keep_their_meaning():
    body = {"temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "x", "seed": 3, "top_k": 5, "model": "any", "user": "u"}
    expected = SamplingParams(max_tokens=None, temperature=0.5, top_p=0.9, n=2, stop="x", seed=3, top_k=5)
    assert chat(**body)[1] == expected
    assert chat(**body, stream=False, metadata={})[1] == expected


def test_null_is_not_set():
    assert chat(temperature=None, tools=None, stop=None, nonsense=None) == chat()


def test_hints_and_what_asks_for_nothing_change_nothing():
    hints = {"verbosity": "low", "prediction": {"type": "content", "content": "a"}, "prompt_cache_retention": "24h"}
    nothing = {"modalities": ["text"], "web_search_options": {}, "tools": [], "tool_choice": "auto", "top_logprobs": 0}
    assert chat(**hints, **nothing) == chat()
    assert completion_request({"prompt": "a", "suffix": "", **hints}, {}) == ("a", SamplingParams())


@pytest.mark.parametrize("ask", [chat, lambda **body: completion_request({"prompt": "a", **body}, {})])
def test_any_seed_of_64_bits_is_one_and_each_is_another(ask):
    seeds = [-(2**63), -2, -1, 0, 1, 2**63 - 1, 2**64 - 2]
    found = [ask(seed=seed)[1].seed for seed in seeds]
    assert found == [2**63, 2**64 - 2, 2**64 - 1, 0, 1, 2**63 - 1, 2**64 - 2]


def test_a_top_p_of_nothing_leaves_the_likeliest():
    found = [chat(top_p=zero)[1].top_p for zero in (0, 0.0, -0.0)]
    assert set(found) == {LEAST_TOP_P}
    logits = jnp.asarray([[1.0, 3.0, 2.9999, -4.0]])
    column = jnp.asarray([1.0])
    bound = filter_bound(logits, 0 * column, jnp.asarray([0]), column * LEAST_TOP_P, 0 * column)
    assert list((logits >= bound.reshape(1, 1))[0]) == [False, True, False, False]


def test_logprobs_of_a_chat_are_a_switch_and_a_count():
    assert chat(logprobs=True)[1].logprobs == 0
    assert chat(logprobs=True, top_logprobs=4)[1].logprobs == 4
    assert chat(logprobs=False)[1].logprobs is None
    assert completion_request({"prompt": "a", "logprobs": 4}, {})[1].logprobs == 4


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts, "name": "me"}])[0] == [
        {"role": "user", "content": "ab", "name": "me"}
    ]


@pytest.mark.parametrize("prompt, expected", [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2])])
def test_a_completion_takes_text_or_ids(prompt, expected):
    assert completion_request({"prompt": prompt}, {}) == (expected, SamplingParams())


@pytest.mark.parametrize(
    "body, words",
    [
        ({"nonsense": 1}, "nonsense is no known field"),
        ({"tools": [{}]}, "tools=[{}] is not served here; leave it out and describe"),
        ({"modalities": ["text", "audio"]}, "modalities=['text', 'audio'] is not served here; leave it out and take"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options="),
        ({"moderation": {"model": "m"}}, "moderation="),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809"),
        ({"top_p": False}, "top_p=False"),
        ({"top_p": -0.1}, "top_p=-0.1"),
        ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs"),
        ({"logprobs": 2}, "logprobs=2 is neither true nor false"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"messages": []}, "messages=[]"),
        ({"messages": [{"content": "a"}]}, "has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "tool_call_id"),
        ({"response_format": {"type": "xml"}}, "response_format={'type': 'xml'}"),
        ({"response_format": {"type": "json_schema"}}, "response_format="),
        ({"logit_bias": {"a": 1}}, "logit_bias='a'"),
        ({"logit_bias": {"5.5": 1}}, "logit_bias='5.5'"),
        ({"logit_bias": [[5, 1]]}, "logit_bias=[[5, 1]]"),
    ],
)
def test_what_is_not_served_is_named(body, words):
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert words in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 7, ["a", "b"], [[1], [2]], [1, "a"]])
def test_a_prompt_that_is_none_is_refused(prompt):
    with pytest.raises(RequestError):
        completion_request({"prompt": prompt}, {})


def test_response_formats_become_schemas():
    schema = {"type": "object", "properties": {}}
    assert _format_fields({"type": "text"}) == {}
    assert _format_fields({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    assert _format_fields({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}) == {
        "json_schema": schema
    }


@pytest.mark.parametrize("name, value", [("presence_penalty", 0.5), ("logit_bias", {"3": -100})])
def test_newer_fields_are_taken_as_soon_as_sampling_knows_them(name, value):
    if name in KNOWN:
        assert getattr(chat(**{name: value})[1], name)
    else:
        with pytest.raises(RequestError, match=f"{name} is no known field"):
            chat(**{name: value})


@pytest.mark.parametrize("wrong", [True, 1.0, None, "a", [1]])
def test_among_many_token_ids_the_one_that_is_none_is_named(wrong):
    with pytest.raises(RequestError) as told:
        completion_request({"prompt": [7] * 1000 + [wrong] + [7] * 1000}, {})
    assert repr(wrong) in str(told.value) and told.value.field == "prompt" and len(str(told.value)) < 120
