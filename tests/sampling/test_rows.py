# SPDX-License-Identifier: Apache-2.0
"""From params to arrays."""

import dataclasses

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.constraints import mask_of
from metrale_jax.sampling.params import MAX_LOGIT_BIAS, SamplingParams
from metrale_jax.sampling.rows import SamplingRow, check_token_ids, needs_extras, sampling_state

VOCAB = 131
NEEDY = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": -0.1},
    {"frequency_penalty": 0.1},
    {"logit_bias": {3: 1}},
    {"allowed_token_ids": [3]},
    {"banned_token_ids": [3]},
    {"bad_words": ["x"]},
    {"regex": "a+"},
    {"choice": ["a"]},
]


@pytest.mark.parametrize("fields", NEEDY, ids=str)
def test_whoever_asks_for_a_rule_needs_extras(fields):
    assert needs_extras(SamplingParams(**fields))


def test_nobody_else_needs_extras():
    plain = SamplingParams(temperature=0.3, top_n_sigma=1, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5, min_tokens=3)
    assert not needs_extras(plain)
    assert sampling_state([SamplingRow(plain, 0, (1,), 5)], VOCAB, 4).extras == ()


def test_each_field_reaches_its_column_and_padding_is_off():
    params = SamplingParams(
        temperature=0.5, top_n_sigma=1.5, top_k=999, top_p=0.75, min_p=0.25, typical_p=0.125, repetition_penalty=1.25,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={9: -1.5, 4: 2}, min_tokens=3,
    )  # fmt: skip
    row = SamplingRow(params, 7, (1, 2), 5, range(10, 17), mask_of([4, 9], VOCAB))
    state = sampling_state([row, None], VOCAB, 4, history_len=12)
    same = ["temperature", "top_n_sigma", "top_p", "min_p", "typical_p"]
    for name in same:
        assert getattr(state, name)[0] == getattr(params, name)
    assert [getattr(state, name)[1] for name in same] == [0, 0, 1, 0, 1]
    assert state.top_k.tolist() == [VOCAB, 0] and state.seed.tolist() == [7, 0] and state.min_len.tolist() == [8, 0]
    assert state.stop_ids.tolist() == [[1, 2, VOCAB, VOCAB], [VOCAB] * 4]
    extras = state.extras
    assert extras.repetition_penalty.tolist() == [1.25, 1] and extras.output_start.tolist() == [5, 0]
    assert extras.presence_penalty.tolist() == [0.5, 0] and extras.frequency_penalty.tolist() == [-0.5, 0]
    assert extras.history[0].tolist() == [*range(10, 17), *[0] * 5]
    assert extras.bias_ids.shape == (2, MAX_LOGIT_BIAS) and extras.bias_ids[0, :3].tolist() == [4, 9, VOCAB]
    assert extras.bias_values[0, :3].tolist() == [2, -1.5, 0] and (extras.bias_ids[1] == VOCAB).all()
    np.testing.assert_array_equal(extras.mask[0], mask_of([4, 9], VOCAB))
    assert (extras.mask[1] == 0xFFFFFFFF).all()
    for leaves in (state, extras):
        for field in dataclasses.fields(leaves):
            if field.name != "extras":
                assert getattr(leaves, field.name).dtype.itemsize == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [131]},
        {"logit_bias": {131: 1}},
        {"allowed_token_ids": [1, 131]},
        {"banned_token_ids": [131]},
        {"bad_words": [[1, 131]]},
    ],
    ids=str,
)
def test_ids_that_the_model_lacks_are_refused(fields):
    (name,) = fields
    with pytest.raises(RequestError, match=f"{name} names the token id 131, which is not below the vocabulary's 131"):
        check_token_ids(SamplingParams(**fields), VOCAB)
    check_token_ids(SamplingParams(**fields), VOCAB + 1)
