# SPDX-License-Identifier: Apache-2.0
"""Values land in their slots of one layer, all else stays, and a donated pool is written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_append.op import kv_append

SHAPE = (2, 5, 4, 3, 8)  # [L, P, B, K, H]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_land_in_their_slots_and_nothing_else_changes(dtype):
    rng = np.random.default_rng(0)
    before = np.asarray(jnp.asarray(rng.normal(size=SHAPE), jnp.dtype(dtype)), np.float32)
    rows = rng.normal(size=(6, 3, 8)).astype(np.float32)
    slots = np.array([7, 4, 19, 0, 13, 0], np.int32)
    after = kv_append(jnp.asarray(before, jnp.dtype(dtype)), 1, jnp.asarray(slots), jnp.asarray(rows))
    assert after.dtype == jnp.dtype(dtype)
    got = np.asarray(after, np.float32)
    cast = np.asarray(jnp.asarray(rows, jnp.dtype(dtype)), np.float32)
    expected = before.copy()
    for slot, row in zip(slots, cast, strict=True):
        expected[1, slot // 4, slot % 4] = row
    real = np.ones(SHAPE, bool)
    real[1, 0, 0] = False  # Which of several padding rows wins is nobody's concern.
    np.testing.assert_array_equal(got[real], expected[real])


def test_a_donated_pool_is_written_in_place():
    pool = jnp.zeros(SHAPE)
    slots, rows = jnp.asarray([5], jnp.int32), jnp.ones((1, 3, 8))
    append = jax.jit(lambda pool, slots, rows: kv_append(pool, 0, slots, rows), donate_argnums=0)
    compiled = append.lower(pool, slots, rows).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    after = compiled(pool, slots, rows)
    assert pool.is_deleted()
    assert float(after.sum()) == 24
