# SPDX-License-Identifier: Apache-2.0
"""Many rows are drawn a piece at a time, and draw what they draw alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.sampling.constraints import fixed_mask
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.steps.outcome import WHOLE_ROWS, sample_rows

VOCAB, HISTORY, STOPS, LOGPROBS = 131, 32, 4, 3
BROKEN = 2  # The sequence with a logit that is no number.
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.1, top_k=9, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.8, typical_p=0.7, top_n_sigma=1.5),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, min_tokens=12),
    SamplingParams(temperature=0, frequency_penalty=1.2, presence_penalty=0.4, logit_bias={4: 3.0}),
    SamplingParams(temperature=1.3, allowed_token_ids=list(range(40))),
]
sample = jax.jit(partial(sample_rows, num_logprobs=LOGPROBS))


def batch(num_sequences, width, extras=True):
    rng = np.random.default_rng(width)
    rows = []
    for index in range(num_sequences):
        params = KINDS[index % len(KINDS)]
        rows.append(
            SamplingRow(params, index, (1, 2, 3), 9, rng.integers(0, VOCAB, 20).tolist(), fixed_mask(params, VOCAB))
        )
    state = jax.tree.map(jnp.asarray, sampling_state(rows, VOCAB, STOPS, HISTORY if extras else 0))
    logits = (rng.normal(size=(num_sequences * width, VOCAB)) * 2).astype(np.float32)
    logits[BROKEN * width + width // 2, 7] = np.nan
    positions = rng.integers(10, 20, num_sequences)[:, None] + np.arange(width)
    return jnp.asarray(logits), state, jnp.asarray(positions, jnp.int32)


# Pieces that fill the rows, that overlap, of one sequence, and of a sequence with more positions than a piece has rows.
@pytest.mark.parametrize(
    ("num_sequences", "width", "extras"),
    [(64, 4, True), (67, 1, False), (23, 5, True), (5, 21, True), (3, 40, False)],
    ids=lambda x: str(x),
)
def test_rows_drawn_in_pieces_are_those_of_each_sequence_alone(num_sequences, width, extras):
    logits, state, positions = batch(num_sequences, width, extras)
    assert logits.shape[0] > WHOLE_ROWS
    together = sample(logits, state, positions)

    def alone(i):
        state_of_one = jax.tree.map(lambda leaf: leaf[i : i + 1], state)
        return sample(logits[i * width : (i + 1) * width], state_of_one, positions[i : i + 1])

    expected = jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(alone, range(num_sequences)))
    healthy = np.arange(num_sequences) != BROKEN
    np.testing.assert_array_equal(np.all(together.finite, axis=1), healthy)
    for name in ("tokens", "num_tokens", "drawable", "top_ids"):
        got, wanted = (np.asarray(getattr(out, name))[healthy] for out in (together, expected))
        np.testing.assert_array_equal(got, wanted, err_msg=name)
    # A CPU sums a vocabulary in another order for another number of rows.
    for name in ("logprobs", "top_logprobs"):
        got, wanted = (np.asarray(getattr(out, name))[healthy] for out in (together, expected))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def loops(num_sequences, width):
    traced = jax.make_jaxpr(partial(sample_rows, num_logprobs=0))(*batch(num_sequences, width))
    return sum(equation.primitive.name == "scan" for equation in traced.jaxpr.eqns)


def test_a_few_rows_are_drawn_at_once():
    assert [loops(4, 1), loops(16, 4), loops(WHOLE_ROWS, 1)] == [0, 0, 0]
    assert loops(WHOLE_ROWS + 1, 1) == 1


def test_the_memory_that_drawing_takes_does_not_grow_with_the_rows():
    def temporaries(num_sequences):
        return sample.lower(*batch(num_sequences, 4)).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(24), temporaries(192)
    row = VOCAB * 4
    assert many - few < (192 - 24) * 4 * row * 1.5, "all rows were worked on at once"
