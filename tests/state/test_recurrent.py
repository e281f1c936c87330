# SPDX-License-Identifier: Apache-2.0
"""Recurrent state by slot, apart from the kernels that advance it."""

import jax
import numpy as np

from metrale_jax.state.recurrent import RecurrentSpec, abstract, limit_slots

SPEC = RecurrentSpec(3, 4, 5, 6, 4, (), 0, "float32", "float32")


def test_a_norm_above_the_limit_is_brought_down_to_it_and_nothing_else_is_touched():
    rng = np.random.default_rng(0)
    storage = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract(SPEC, 2, 6))
    storage.matrix[:, 2, 1] *= 1e-3
    storage.matrix[:, 5] = np.nan
    before = jax.tree.map(np.copy, storage)
    after = jax.jit(limit_slots)(storage, np.asarray([4, 2, 0, 0]), np.float32(1.5))
    want = before.matrix.copy()
    for slot in (0, 2, 4):
        for layer, head in np.ndindex(2, 3):
            norm = np.linalg.norm(want[layer, slot, head].astype(np.float64))
            if norm > 1.5:
                want[layer, slot, head] *= 1.5 / norm
    np.testing.assert_allclose(after.matrix, want, rtol=1e-6)
    small = np.s_[:, 2, 1]
    np.testing.assert_array_equal(after.matrix[small], before.matrix[small])
    for slot in (1, 3, 5):
        np.testing.assert_array_equal(after.matrix[:, slot], before.matrix[:, slot])
    np.testing.assert_array_equal(after.conv, before.conv)
