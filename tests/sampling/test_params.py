# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, and how it is told that it may not."""

import math

import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams, seed_bits

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
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value))
def test_a_value_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "\n" not in message


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
