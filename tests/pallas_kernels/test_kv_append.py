# SPDX-License-Identifier: Apache-2.0
"""Rows land in their slots of one layer in every format, all else stays, and donated pages are written in place.

The GPU's and the TPU's kernels are interpreted on the CPU.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.int8 import rounded
from pallas_kernels.kv_formats.pages import KvPages, abstract_pages
from pallas_kernels.kv_formats.registry import FORMATS, format_named
from pallas_kernels.paged_attention.reference import plain_rows

IMPLS = pytest.mark.parametrize("impl", ["xla", "triton-interpreted", "mosaic_tpu-interpreted"])
SHAPE = (2, 5, 4, 3)  # [L, P, B, K]
SLOTS = np.array([7, 4, 19, 0, 13, 0], np.int32)
# Half a step of each format, of the row's largest number where rows have scales and of the number itself where not.
ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 0.5 / 127}


def pages_of(kv_format: str, seed: int = 0) -> KvPages:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32).astype(x.dtype),
        abstract_pages(kv_format, SHAPE, 8, 6),
    )


def new_rows(seed: int = 1):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(6, 3, width)).astype(np.float32) * 3 for width in (8, 6))


@IMPLS
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_land_in_their_slots_within_half_a_step_and_nothing_else_changes(kv_format, impl):
    before, (keys, values) = pages_of(kv_format), new_rows()
    after = kv_append(before, 1, jnp.asarray(SLOTS), jnp.asarray(keys), jnp.asarray(values), "cpu", impl)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    for name, rows in (("k", keys), ("v", values)):
        got = plain_rows(getattr(after, name), getattr(after, f"{name}_scale"))
        for slot, row in zip(SLOTS, rows, strict=True):
            if slot:
                error = np.abs(got[1, slot // 4, slot % 4] - row)
                assert (error <= np.abs(row).max(axis=-1, keepdims=True) * ROUNDING[kv_format] + 1e-7).all()
        same = np.ones(SHAPE[:3], bool)
        same[1, SLOTS // 4, SLOTS % 4] = False
        for array, untouched in ((name, same), (f"{name}_scale", same)):
            old, new = (np.asarray(getattr(pages, array), np.float32) for pages in (before, after))
            if old.size:
                moved = (lambda x: x) if array == name else (lambda x: x.swapaxes(2, 3))
                np.testing.assert_array_equal(moved(new)[untouched], moved(old)[untouched])


@IMPLS
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_scales_of_heads_are_applied_as_they_stand(kv_format, impl):
    shapes = abstract_pages(kv_format, SHAPE, 8, 6)
    scales = jnp.asarray([[9.0, 9.0, 9.0], [0.5, 0.25, 2.0]], jnp.float32)
    empty = (jnp.zeros(x.shape, x.dtype) for x in (shapes.k, shapes.v))
    before = KvPages(*empty, scales, scales, kv_format)
    keys, values = new_rows()
    after = kv_append(before, 1, jnp.asarray(SLOTS), jnp.asarray(keys), jnp.asarray(values), "cpu", impl)
    np.testing.assert_array_equal(after.k_scale, scales)
    codes = np.asarray(after.k[1, SLOTS // 4, SLOTS % 4]).astype(np.float32)
    wanted = keys / np.asarray(scales[1])[:, None]
    dtype = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}.get(kv_format)
    wanted = np.round(wanted) if dtype is None else wanted.astype(dtype).astype(np.float32)
    real = SLOTS > 0
    np.testing.assert_array_equal(codes[real], wanted[real])


@IMPLS
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_extreme_rows_stay_finite_and_a_row_of_zeros_is_zero(kv_format, impl):
    keys = np.zeros((6, 3, 8), np.float32)
    keys[0], keys[1], keys[2, 0, 0] = 3e38, 1e-30, -1e9
    values = jnp.zeros((6, 3, 6))
    after = kv_append(pages_of(kv_format), 0, jnp.asarray(SLOTS), jnp.asarray(keys), values, "cpu", impl)
    got = plain_rows(after.k, after.k_scale)[0, SLOTS // 4, SLOTS % 4]
    assert np.isfinite(got[SLOTS > 0]).all()
    np.testing.assert_allclose(got[:3], keys[:3], rtol=0.07, atol=1e-37)
    assert not got[4].any()


@pytest.mark.parametrize("impl", ["xla", "triton-interpreted"])
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_keys_that_hold_their_values_are_all_that_is_written(kv_format, impl):
    rng = np.random.default_rng(0)
    before = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract_pages(kv_format, (2, 5, 4, 1), 14, 0))
    keys = jnp.asarray(rng.normal(size=(6, 1, 14)), jnp.float32)
    after = kv_append(before, 1, jnp.asarray(SLOTS), keys, keys[..., :0], "cpu", impl)
    assert after.latent
    got, real = plain_rows(after.k, after.k_scale), SLOTS > 0
    np.testing.assert_allclose(got[1, SLOTS // 4, SLOTS % 4][real], np.asarray(keys)[real], atol=0.02)
    assert (got[0] == 1).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_donated_pages_are_written_in_place(kv_format):
    pages, (keys, values) = pages_of(kv_format), new_rows()
    append = jax.jit(lambda pages, *new: kv_append(pages, 0, *new, "cpu"), donate_argnums=0)
    arguments = (pages, jnp.asarray(SLOTS), jnp.asarray(keys), jnp.asarray(values))
    compiled = append.lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(pages))
    compiled(*arguments)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pages))


def test_an_unknown_format_is_named_with_the_list():
    with pytest.raises(ValueError, match=r"'fp4' is unknown; use one of \['bfloat16', 'float16'"):
        format_named("fp4")


def test_whole_numbers_are_the_nearest_with_ties_to_even():
    numbers = np.concatenate([np.arange(-4, 4.25, 0.25), [0.49999997, -1e-9, 126.5, -127.5, 1e9]]).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(numbers)), np.round(numbers))


def test_blocks_that_runs_of_tokens_share_and_come_back_to_keep_all_their_scales():
    """On a TPU a block's scales are read, changed and written, for dozens of tokens at a time."""
    rng = np.random.default_rng(0)
    shape = (2, 18, 8, 3)
    before = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_pages("int8", shape, 8, 6))
    slots = np.concatenate([np.arange(13, 45), np.zeros(3), rng.permutation(np.arange(96, 132))])
    slots = jnp.asarray(slots, jnp.int32)
    keys, values = (jnp.asarray(rng.normal(size=(len(slots), 3, width)), jnp.float32) for width in (8, 6))
    outs = [
        jax.tree.map(lambda x: x[:, 1:], kv_append(before, 1, slots, keys, values, "cpu", impl))
        for impl in ("xla", "mosaic_tpu-interpreted")
    ]
    jax.tree.map(np.testing.assert_array_equal, *outs)
