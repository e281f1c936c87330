# SPDX-License-Identifier: Apache-2.0
"""What counts as prompts and as the parameters of so many."""

from collections import deque

import numpy as np
import pytest

from metrale_jax.answers import checked_prompts, params_for
from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import checked_tokens
from metrale_jax.sampling.params import SamplingParams


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ("a", ["a"]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(2), [[0, 1]]),
        (np.array([1, 2]), [[1, 2]]),
        (deque(["a"]), ["a"]),
        ([], []),
    ],
    ids=str,
)
def test_prompts_are_texts_and_lists_of_ids_one_or_many(prompts, expected):
    assert checked_prompts(prompts) == expected


@pytest.mark.parametrize(
    "prompts", [b"x", bytearray(b"x"), {"a": 1}, {1, 2}, None, 7, 10**5000], ids=lambda value: type(value).__name__
)
def test_what_is_no_list_is_no_prompt(prompts):
    with pytest.raises(RequestError, match="prompts=.* is no text, list of token ids or list of these"):
        checked_prompts(prompts)


@pytest.mark.parametrize(
    "prompt", [b"x", bytearray(b"x"), memoryview(b"x"), {1: 2}, {1, 2}], ids=lambda value: type(value).__name__
)
def test_what_has_items_and_is_no_list_of_ids_is_no_prompt(prompt):
    with pytest.raises(RequestError, match=f"is a {type(prompt).__name__}; give a text or a list of token ids"):
        checked_tokens(prompt, 200)


def test_params_serve_all_or_one_each():
    one, other = SamplingParams(), SamplingParams(n=2)
    assert params_for(None, 2) == [one, one] and params_for(other, 2) == [other, other]
    assert params_for((one, other), 2) == [one, other]
    with pytest.raises(RequestError, match="2 sampling params for 3 prompts"):
        params_for([one, other], 3)


@pytest.mark.parametrize(
    "params", [{"max_tokens": 3}, [{"max_tokens": 3}], [None], 3, "a", {SamplingParams()}], ids=str
)
def test_what_is_no_sampling_params_is_refused(params):
    with pytest.raises(RequestError, match="is no SamplingParams or list of them; give SamplingParams"):
        params_for(params, 1)
