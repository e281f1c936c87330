# SPDX-License-Identifier: Apache-2.0
"""Every case, implementation by implementation, against the reference, with NaN in all memory that nobody owns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.op import (
    IMPLEMENTATIONS,
    AttentionParams,
    SequenceRows,
    by_length,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.paged_attention.reference import attend as reference
from pallas_kernels.shapes import ceil_div

LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


class Problem:
    """A case's arrays: a pool of NaN but for the tokens that a query may see, tables with holes behind windows."""

    def __init__(self, case: Case, dtype: str, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.case, self.dtype = case, dtype
        self.query_width = max(case.query_lens)
        needed = [ceil_div(kv_len, case.block_size) for kv_len in case.kv_lens]
        table_width = max(needed) + 1
        num_blocks = sum(needed) + 3
        free = list(rng.permutation(np.arange(1, num_blocks)))
        self.tables = np.zeros((len(needed), table_width), np.int32)
        shape = (LAYERS, num_blocks, case.block_size, case.num_kv_heads)
        k = np.full((*shape, case.head_dim), np.nan, np.float32)
        v = np.full((*shape, case.v_head_dim), np.nan, np.float32)
        for row, (kv_len, query_len) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
            oldest = max(0, kv_len - query_len - case.window + 1) if case.window else 0
            for index in range(oldest // case.block_size, needed[row]):
                self.tables[row, index] = free.pop()
            for token in range(oldest, kv_len):
                where = (LAYER, self.tables[row, token // case.block_size], token % case.block_size)
                k[where] = rng.normal(size=k[where].shape)
                v[where] = rng.normal(size=v[where].shape)
        self.q = jnp.asarray(
            rng.normal(size=(len(needed), self.query_width, case.num_heads, case.head_dim)), jnp.dtype(dtype)
        )
        self.k, self.v = jnp.asarray(k, jnp.dtype(dtype)), jnp.asarray(v, jnp.dtype(dtype))
        self.params = AttentionParams(case.head_dim**-0.5, case.window, case.softcap)

    def rows(self, query_starts, max_query_len):
        lens = (jnp.asarray(x, jnp.int32) for x in (self.case.kv_lens, self.case.query_lens, query_starts))
        return SequenceRows(jnp.asarray(self.tables), *lens, max_query_len)

    def uniform(self):
        starts = np.arange(len(self.tables)) * self.query_width
        return self.rows(starts, self.query_width)

    def run(self, entry, q, rows):
        whole = jax.jit(lambda q, k, v, rows: entry(q, k, v, LAYER, rows, self.params, "cpu"))
        return whole(q, self.k, self.v, rows)

    def expected(self):
        return reference(
            *(np.asarray(x, np.float32) for x in (self.q, self.k, self.v)), LAYER, self.uniform(), self.params
        )

    def assert_decode_is_right(self):
        out = self.run(decode_attention, self.q, self.uniform())
        assert out.dtype == self.q.dtype
        assert out.shape == (*self.q.shape[:3], self.case.v_head_dim)
        close(out, self.expected(), self.dtype)

    def assert_ragged_is_right(self, num_padding: int):
        lens = np.asarray(self.case.query_lens)
        starts = np.cumsum(lens) - lens
        flat = [np.asarray(self.q[row, :length], np.float32) for row, length in enumerate(lens)]
        padding = np.full((num_padding, *self.q.shape[2:]), np.nan, np.float32)
        q = jnp.asarray(np.concatenate([*flat, padding]), jnp.dtype(self.dtype))
        out = self.run(prefill_attention, q, self.rows(starts, q.shape[0]))
        assert out.dtype == self.q.dtype
        expected = [part[:length] for part, length in zip(self.expected(), lens, strict=True)]
        empty = np.zeros((num_padding, *out.shape[1:]))
        close(out, np.concatenate([*expected, empty]), self.dtype)


def close(out, expected, dtype):
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    unused = ~expected.reshape(*expected.shape[:-2], -1).any(axis=-1)
    assert not out[unused].any(), "rows that hold no query are exactly zero"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_rows_agree_with_the_reference(case):
    Problem(case, "float32").assert_decode_is_right()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_chunks_agree_with_the_reference(case):
    Problem(case, "float32").assert_ragged_is_right(num_padding=5)


# Each compiles a program: the entry point that a case is named after is enough.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_bfloat16_too(case):
    problem = Problem(case, "bfloat16")
    if case.name.startswith("prefill"):
        problem.assert_ragged_is_right(num_padding=5)
    else:
        problem.assert_decode_is_right()


ROW = st.tuples(st.integers(0, 9), st.integers(0, 70))
SIZES = {
    "head_dim": st.sampled_from([8, 12]),
    "v_head_dim": st.sampled_from([4, 12]),
    "block_size": st.sampled_from([1, 4, 16]),
    "window": st.sampled_from([0, 1, 5, 100]),
    "softcap": st.sampled_from([0.0, 2.0]),
}


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4).filter(lambda rows: any(query for query, _ in rows)),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.fixed_dictionaries(SIZES),
    seed=st.integers(0, 99),
)
def test_any_shape_agrees_with_the_reference(rows, heads, sizes, seed):
    query_lens = tuple(query for query, _ in rows)
    kv_lens = tuple(query + past if query else 0 for query, past in rows)
    num_kv_heads, group = heads
    problem = Problem(Case("drawn", kv_lens, query_lens, num_kv_heads * group, num_kv_heads, **sizes), "float32", seed)
    if seed % 2:
        problem.assert_decode_is_right()
    else:
        problem.assert_ragged_is_right(num_padding=seed % 3)


def test_a_chunk_longer_than_a_piece_and_a_past_longer_than_a_tile_agree_with_the_reference():
    case = Case("long", (1030, 200), (70, 130), 2, 1, 8, 8, block_size=32, window=600)
    Problem(case, "float32").assert_ragged_is_right(num_padding=56)


def test_rows_put_in_order_once_for_all_layers_give_the_same():
    (case,) = (case for case in CASES if case.name == "verify-many-window")
    problem = Problem(case, "float32")
    rows = problem.uniform()
    ordered = by_length(rows)
    assert list(ordered.kv_lens) == sorted(case.kv_lens, reverse=True)
    np.testing.assert_array_equal(ordered.kv_lens, rows.kv_lens[ordered.query_starts // problem.query_width])
    np.testing.assert_array_equal(
        problem.run(decode_attention, problem.q, rows.replace(pieces=ordered)),
        problem.run(decode_attention, problem.q, rows),
    )


def test_heads_that_do_not_divide_are_refused_with_their_numbers():
    problem = Problem(CASES[0], "float32")
    with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        decode_attention(problem.q[:, :, :3], problem.k, problem.v, LAYER, problem.uniform(), problem.params, "cpu")


def test_an_unknown_platform_or_implementation_is_named():
    with pytest.raises(DispatchError, match="not metal"):
        choose("paged_attention", IMPLEMENTATIONS, "metal")
    with pytest.raises(DispatchError, match="impl='cuda-graph'"):
        choose("paged_attention", IMPLEMENTATIONS, "cpu", "cuda-graph")
