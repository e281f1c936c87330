# SPDX-License-Identifier: Apache-2.0
"""How many drafts stand, against counting one at a time."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.sampling.accept import accepted_lengths

WIDTH, ROWS = 5, 4
ROW = st.tuples(
    st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH),
    st.integers(0, WIDTH),
    st.lists(st.integers(0, 1), min_size=WIDTH + 1, max_size=WIDTH + 1),
)


def counted(drafts, draft_len, targets):
    for index in range(draft_len):
        if drafts[index] != targets[index]:
            return index
    return draft_len


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ROW, min_size=ROWS, max_size=ROWS))
def test_drafts_stand_up_to_the_first_that_differs(rows):
    drafts, lens, targets = (np.asarray(column, np.int32) for column in zip(*rows, strict=True))
    got = accepted_lengths(jnp.asarray(drafts), jnp.asarray(lens), jnp.asarray(targets))
    assert np.asarray(got).tolist() == [counted(*row) for row in rows]


def test_no_drafts_are_no_accepted_drafts():
    got = accepted_lengths(jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32), jnp.ones((3, 1), jnp.int32))
    assert np.asarray(got).tolist() == [0, 0, 0]
