# SPDX-License-Identifier: Apache-2.0
"""Rules and filters, from params to logits, against transformers and against what their documents say."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.constraints import fixed_mask, mask_of
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.sampling.rules import repeated, ruled_logits
from metrale_jax.sampling.sample import draw
from metrale_jax.sampling.transforms import filter_limits, survives
from tests.conftest import GOLDENS

VOCAB, HISTORY, STOPS = 131, 32, 8
rule = jax.jit(ruled_logits)


@jax.jit
def processed(logits, state, positions):
    """What the noise is added to."""
    ruled = ruled_logits(logits, state, positions[:, None])
    hot = state.temperature > 0
    scaled = ruled / jnp.where(hot, state.temperature, 1)[:, None]
    kept = survives(scaled, filter_limits(scaled, state, hot)) | ~hot[:, None]
    return jnp.where(kept, scaled, -jnp.inf)


@jax.jit
def drawn(logits, state, positions):
    width = positions.shape[1]
    every = jax.tree.map(partial(repeated, width=width), state.replace(extras=()))
    return draw(ruled_logits(logits, state, positions), every, positions.reshape(-1)).reshape(positions.shape)


def state_of(rows) -> SamplingState:
    return jax.tree.map(jnp.asarray, sampling_state(rows, VOCAB, STOPS, HISTORY))


def row_of(params, tokens=(), prompt_len=0, stop_ids=(), seed=0):
    return SamplingRow(params, seed, stop_ids, prompt_len, tokens, fixed_mask(params, VOCAB))


def some_logits(num_rows, seed=0, scale=2.0):
    return (np.random.default_rng(seed).normal(size=(num_rows, VOCAB)) * scale).astype(np.float32)


def test_mixtures_of_rules_and_filters_are_those_of_transformers():
    data = np.load(GOLDENS / "sampling.npz")
    cases = json.loads(str(data["cases"]))
    rows = [
        row_of(SamplingParams(**case["params"]), case["tokens"], case["prompt_len"], cases["stop_ids"])
        for case in cases["rows"]
    ]
    positions = jnp.asarray([len(row.tokens) for row in rows], jnp.int32)
    got = np.asarray(processed(jnp.asarray(data["logits"]), state_of(rows), positions))
    want = data["processed"]
    for index, case in enumerate(cases["rows"]):
        np.testing.assert_array_equal(np.isfinite(got[index]), np.isfinite(want[index]), err_msg=str(case))
        np.testing.assert_allclose(got[index], want[index], rtol=1e-5, atol=1e-5, err_msg=str(case))


def test_frequency_and_presence_count_the_answer_and_not_the_prompt():
    rng = np.random.default_rng(1)
    rows, positions = [], []
    for frequency, presence in ((0.5, 0), (0, 1.5), (2, -2), (-0.7, 0.3), (0, 0)):
        params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
        tokens = rng.integers(0, 9, 30).tolist()
        rows.append(row_of(params, tokens, 12))
        positions.append(25)  # The last five entries lie ahead.
    logits = some_logits(len(rows))
    got = np.asarray(rule(jnp.asarray(logits), state_of(rows), jnp.asarray(positions, jnp.int32)[:, None]))
    for row, before, after in zip(rows, logits, got, strict=True):
        counts = np.bincount(row.tokens[12:25], minlength=VOCAB)
        # mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        expected = before - counts * row.params.frequency_penalty - (counts > 0) * row.params.presence_penalty
        np.testing.assert_allclose(after, expected, atol=1e-5)


def test_bias_is_added_last_and_raises_no_masked_token():
    params = SamplingParams(logit_bias={3: 100, 5: -100, 7: 50}, banned_token_ids=[7], repetition_penalty=2.0)
    logits = some_logits(1)
    logits[0, 3] = 4
    got = np.asarray(rule(jnp.asarray(logits), state_of([row_of(params, [3], 1)]), jnp.asarray([[1]], jnp.int32)))
    expected = logits.copy()
    expected[0, 3], expected[0, 5], expected[0, 7] = 102, logits[0, 5] - 100, -np.inf
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_full_table_of_biases_reaches_every_token():
    params = SamplingParams(logit_bias={token: float(token) - 60 for token in range(VOCAB)})
    logits = some_logits(1)
    got = np.asarray(rule(jnp.asarray(logits), state_of([row_of(params)]), jnp.asarray([[0]], jnp.int32)))
    np.testing.assert_allclose(got, logits + np.arange(VOCAB) - 60, atol=1e-5)


def test_extras_that_ask_for_nothing_change_nothing():
    logits = some_logits(4)
    rows = [row_of(SamplingParams(), range(9), 3), None, row_of(SamplingParams(temperature=0), range(9), 3), None]
    got = rule(jnp.asarray(logits), state_of(rows), jnp.full((4, 1), 9, jnp.int32))
    np.testing.assert_array_equal(got, logits)


EVERY_KIND = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0, logit_bias={9: 7.5}, allowed_token_ids=[3, 9, 77, 130]),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.2, frequency_penalty=1.0, presence_penalty=0.5),
    SamplingParams(temperature=0.7, top_k=9, banned_token_ids=list(range(60))),
    SamplingParams(temperature=1.0, typical_p=0.4, logit_bias={0: 3.0}),
    SamplingParams(temperature=1.4, top_n_sigma=1.0, min_p=0.02),
    SamplingParams(temperature=1.1, top_p=0.8, min_tokens=4, repetition_penalty=0.6),
]


def rows_of_every_kind():
    rng = np.random.default_rng(3)
    return [
        row_of(params, rng.integers(0, VOCAB, 20).tolist(), 11, (1, 2, 3), seed=index)
        for index, params in enumerate(EVERY_KIND)
    ]


def test_each_row_of_a_mixture_draws_as_it_does_alone():
    rows, logits = rows_of_every_kind(), some_logits(len(EVERY_KIND))
    positions = np.arange(len(rows), dtype=np.int32)[:, None] + 12
    together = np.asarray(drawn(jnp.asarray(logits), state_of(rows), jnp.asarray(positions)))
    for index, row in enumerate(rows):
        alone = state_of([row, *[None] * (len(rows) - 1)])
        others = some_logits(len(rows), seed=9)
        others[0] = logits[index]
        where = np.full_like(positions, positions[index])
        got = np.asarray(drawn(jnp.asarray(others), alone, jnp.asarray(where)))
        assert got[0] == together[index], EVERY_KIND[index]


def test_a_row_without_extras_draws_alike_in_a_batch_with_them():
    plain = [row for row in rows_of_every_kind() if row.params in (EVERY_KIND[0], EVERY_KIND[3], EVERY_KIND[7])]
    logits, positions = jnp.asarray(some_logits(3)), jnp.full((3, 1), 15, jnp.int32)
    without = jax.tree.map(jnp.asarray, sampling_state(plain, VOCAB, STOPS))
    assert without.extras == ()
    np.testing.assert_array_equal(drawn(logits, without, positions), drawn(logits, state_of(plain), positions))


def test_several_positions_are_ruled_as_if_their_tokens_came_one_at_a_time():
    rows, width = rows_of_every_kind(), 4
    logits = some_logits(len(rows) * width)
    state, first = state_of(rows), np.full((len(rows), 1), 14, np.int32)
    positions = jnp.asarray(first + np.arange(width))
    together = np.asarray(rule(jnp.asarray(logits), state, positions)).reshape(len(rows), width, VOCAB)
    for index in range(width):
        column = jnp.asarray(logits.reshape(len(rows), width, VOCAB)[:, index])
        np.testing.assert_array_equal(together[:, index], rule(column, state, positions[:, index : index + 1]))


def test_a_prompts_end_between_drafts_begins_the_count_there():
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    state = state_of([row_of(params, [4, 4, 5, 4, 6, 5], 3)])
    logits = np.ones((5, VOCAB), np.float32)
    got = np.asarray(rule(jnp.asarray(logits), state, jnp.arange(2, 7, dtype=jnp.int32)[None]))
    for row, position in enumerate(range(2, 7)):
        before, answer = [4, 4, 5, 4, 6, 5][:position], [4, 6, 5][: max(0, position - 3)]
        for token in (4, 5, 6, 7):
            expected = (1 / 1.5 if token in before else 1) - answer.count(token)
            assert got[row, token] == pytest.approx(expected, abs=1e-6)


def test_each_position_can_have_a_mask_of_its_own():
    rows = rows_of_every_kind()[:2]
    state = state_of(rows)
    masks = np.stack([[mask_of([i, 40 + i, 130], VOCAB) for i in range(3 * s, 3 * s + 3)] for s in range(2)])
    state = state.replace(extras=state.extras.replace(mask=jnp.asarray(masks)))
    logits = some_logits(6)
    got = np.asarray(rule(jnp.asarray(logits), state, jnp.asarray([[20, 21, 22]] * 2, jnp.int32)))
    for index in range(6):
        assert np.flatnonzero(np.isfinite(got[index])).tolist() == [index, 40 + index, 130]
