# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, and how it is told that it may not."""

import dataclasses
import json
import math

import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import CHECKS, SamplingParams, seed_bits

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("n", 0),
    ("n", 2.0),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2.5),
    ("max_tokens", "7"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 3),
    ("top_n_sigma", -1),
    ("typical_p", 0),
    ("typical_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {" 5": 1}),
    ("logit_bias", {"5.0": 1}),
    ("logit_bias", {"-5": 1}),
    ("logit_bias", {"9" * 30: 1}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: None}),
    ("logit_bias", [5]),
    ("logit_bias", 5),
    ("logit_bias", dict.fromkeys(range(513), 1)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("banned_token_ids", [1.5]),
    ("bad_words", "word"),
    ("bad_words", [" "]),
    ("bad_words", [[]]),
    ("bad_words", [[1, -1]]),
    ("bad_words", [3]),
    ("prompt_logprobs", 21),
    ("echo", 1),
    ("json_schema", "{"),
    ("json_schema", 3),
    ("json_schema", {"a": {1}}),
    ("regex", ""),
    ("choice", []),
    ("choice", ["a", ""]),
    ("choice", "ab"),
    ("grammar", 7),
    ("beam_width", -1),
    ("length_penalty", math.nan),
    ("early_stopping", "always"),
    ("early_stopping", 1),
    ("priority", 0.5),
    ("priority", 2**31),
    ("deadline_s", 0),
    ("deadline_s", math.inf),
    ("cache_salt", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value))
def test_a_value_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "\n" not in message


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["huge", "low", "unspeakable"])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_a_number_too_large_for_anything_is_refused(name, value):
    for spelt in (value, [value]):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: spelt})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_what_is_nested_too_deep_is_refused(name):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: deep(100_000)})


def test_a_schema_nested_too_deep_is_refused_as_text_too():
    with pytest.raises(RequestError, match="json_schema=.* is not JSON"):
        SamplingParams(json_schema="[" * 60_000)


def test_a_deadline_must_be_finite():
    with pytest.raises(RequestError, match="deadline_s=inf is not a finite number above 0; use seconds"):
        SamplingParams(deadline_s=math.inf)


def test_a_bias_may_name_its_tokens_as_json_does():
    assert SamplingParams(logit_bias={"7": -2, 5: 1}).logit_bias == ((5, 1), (7, -2))


def test_the_message_holds_value_limit_and_way_out():
    with pytest.raises(RequestError, match=r"top_p=0 is not a number above 0 to 1; use a value above 0 and up to 1"):
        SamplingParams(top_p=0)


GOOD = [
    {"temperature": 0},
    {"temperature": 2.5, "top_k": -1, "top_p": 1, "min_p": 1},
    {"seed": 2**64 - 1},
    {"max_tokens": None, "min_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5},
    {"logprobs": 0},
    {"logprobs": 20},
    {"top_n_sigma": 1, "typical_p": 1, "repetition_penalty": 0.5, "presence_penalty": 2, "frequency_penalty": -2},
    {"prompt_logprobs": 0, "echo": True, "priority": -3, "deadline_s": 0.5, "cache_salt": "tenant"},
    {"beam_width": 4, "n": 4, "length_penalty": -1.5, "early_stopping": "never"},
    {"json_schema": "{}"},
    {"regex": "[0-9]+"},
    {"grammar": "start: /a/"},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_at_their_limits_are_taken(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


def test_stops_of_any_spelling_become_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_tiny_temperatures_mean_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_small_seeds_are_themselves_and_each_sample_has_its_own():
    assert seed_bits(0, 0) == 0
    assert seed_bits(1234, 0) == 1234
    bits = {seed_bits(seed, sample) for seed in (0, 1, 2**32, 2**40 + 1, 2**64 - 1) for sample in range(50)}
    assert len(bits) == 250
    assert all(0 <= value < 2**32 for value in bits)


def test_params_hash_and_can_be_changed_whatever_they_were_made_of():
    params = SamplingParams(
        logit_bias={7: 1.0, 3: -1},
        allowed_token_ids=[3, 7],
        bad_words=["no", [1, 2]],
        choice=["a", "b"],
    )
    assert params.logit_bias == ((3, -1), (7, 1.0))
    assert params.bad_words == ("no", (1, 2)) and params.choice == ("a", "b")
    assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)
    assert params == dataclasses.replace(params, logit_bias=[[3, -1], [7, 1.0]])


def test_a_schema_keeps_the_order_of_its_properties():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    text = SamplingParams(json_schema=schema).json_schema
    assert json.loads(text) == schema and text.index('"b"') < text.index('"a"')
    assert SamplingParams(json_schema=text).json_schema == text


def test_an_answer_has_one_structure():
    with pytest.raises(RequestError, match="json_schema and regex are given"):
        SamplingParams(json_schema={}, regex="a")
    assert SamplingParams(choice=["a"]).structured and not SamplingParams().structured


def test_a_search_gives_no_more_answers_than_beams():
    with pytest.raises(RequestError, match="n=5 is not an integer from 1 to 4"):
        SamplingParams(n=5, beam_width=4)


def test_every_field_is_checked():
    checked = {*CHECKS, "logit_bias", "min_tokens"}
    assert checked == {field.name for field in dataclasses.fields(SamplingParams)}
