# SPDX-License-Identifier: Apache-2.0
"""What a sequence's history holds after tokens are run and drawn."""

import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.sampling.history import remember, remember_chunks
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_extras

SIZE = 12


@pytest.fixture
def extras():
    rows = [SamplingRow(SamplingParams(), 0, (), 2, tokens) for tokens in ([1, 2, 3], [4, 5, 6, 7], [8])]
    return sampling_extras(rows, 50, SIZE).replace(history=jnp.asarray(sampling_extras(rows, 50, SIZE).history))


def test_tokens_are_written_at_their_positions_and_none_outside(extras):
    positions = jnp.asarray([[3, 4], [-1, 11], [12, 1]], jnp.int32)
    tokens = jnp.asarray([[21, 22], [23, 24], [25, 26]], jnp.int32)
    got = np.asarray(remember(extras, positions, tokens).history)
    expected = np.asarray(extras.history).copy()
    expected[0, 3:5], expected[1, 11], expected[2, 1] = (21, 22), 24, 26
    np.testing.assert_array_equal(got, expected)


def test_chunks_laid_end_to_end_are_written_where_each_sequence_stands(extras):
    tokens = jnp.asarray([31, 32, 33, 34, 35, 99, 99], jnp.int32)
    lengths, seq_len = jnp.asarray([2, 0, 3], jnp.int32), jnp.asarray([3, 4, 0], jnp.int32)
    got = np.asarray(remember_chunks(extras, seq_len, tokens, lengths).history)
    expected = np.asarray(extras.history).copy()
    expected[0, 3:5], expected[2, 0:3] = (31, 32), (33, 34, 35)
    np.testing.assert_array_equal(got, expected)


def test_a_state_without_extras_stays_without():
    column = jnp.zeros((1, 1), jnp.int32)
    assert remember((), column, column) == ()
    assert remember_chunks((), column[0], column[0], column[0]) == ()
