# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel, interpreted on the CPU, against the reference, with NaN in all memory that nobody owns."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.paged_attention.cases import BLOCK_SIZES, CASES, HEAD_DIMS, HEADS, KV_FORMATS, LATENT_CASES, Case
from pallas_kernels.paged_attention.op import (
    IMPLEMENTATIONS,
    RAGGED_IMPLEMENTATIONS,
    SequenceRows,
    by_length,
    decode_attention,
)
from pallas_kernels.paged_attention.splits import num_splits, split_start, split_tokens_for
from pallas_kernels.paged_attention.triton import tiling_for
from pallas_kernels.triton_arrays import parts_of
from tests.pallas_kernels.problems import Problem, close

IMPL = "triton-interpreted"
FACTS = {
    **{"head_dim": 128, "v_head_dim": 128, "latent": 0, "dtype": "bfloat16", "kv_format": "bfloat16"},
    "pool_codes": 1 << 20,
}


def both_are_right(problem: Problem) -> None:
    problem.assert_decode_is_right(impl=IMPL)
    problem.assert_ragged_is_right(impl=IMPL)


# Each compiles a program: the entry point that a case is named after is enough.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_cases_agree_with_the_reference(case):
    if case.name.startswith("prefill"):
        Problem(case).assert_ragged_is_right(impl=IMPL)
    else:
        Problem(case).assert_decode_is_right(impl=IMPL)


# Every format under bfloat16 queries, and under others what is multiplied in another way.
FORMATS = [
    *(("bfloat16", kv_format) for kv_format in KV_FORMATS),
    *(("float16", kv_format) for kv_format in ("bfloat16", "fp8_e5m2", "int8")),
    *(("float32", kv_format) for kv_format in ("float16", "fp8_e4m3")),
]


@pytest.mark.parametrize(("dtype", "kv_format"), FORMATS)
def test_queries_of_every_dtype_over_keys_and_values_in_every_format(dtype, kv_format):
    case = Case("formats", (37, 0, 90), (3, 0, 2), 6, 2, 24, 40, window=60, sinks=True)
    problem = Problem(case, dtype, kv_format=kv_format)
    if dtype == "bfloat16":
        problem.assert_ragged_is_right(impl=IMPL)
    else:
        problem.assert_decode_is_right(impl=IMPL)


def test_scales_of_heads():
    problem = Problem(Case("scales", (37, 9, 150), (1, 1, 1), 6, 2), kv_format="int8")
    k_scale, v_scale = (jnp.asarray([[jnp.nan] * 2, pair], jnp.float32) for pair in ([0.01, 0.03], [0.02, 0.005]))
    problem.pages = problem.pages.replace(k_scale=k_scale, v_scale=v_scale)
    both_are_right(problem)


# Each size that models use, in some company.
COMPANIES = list(zip(HEAD_DIMS, [*HEADS, HEADS[0]], [*BLOCK_SIZES, 1, 48], strict=True))


@pytest.mark.parametrize(("widths", "heads", "block_size"), COMPANIES, ids=lambda value: str(value))
def test_every_head_width_ratio_of_heads_and_block_size(widths, heads, block_size):
    case = Case("sizes", (270, 21), (5, 2), *heads, *widths, block_size=block_size, window=200)
    problem = Problem(case, "bfloat16")
    if block_size % 32:
        problem.assert_decode_is_right(impl=IMPL)
    else:
        problem.assert_ragged_is_right(impl=IMPL)


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_values_that_are_a_part_of_the_keys(case):
    if case.name.startswith("latent-prefill"):
        Problem(case).assert_ragged_is_right(impl=IMPL)
    else:
        Problem(case).assert_decode_is_right(impl=IMPL)


# A rank of several parts, and what lies beside it; rows of more heads than a tile, and a past of more than one split.
WIDE_LATENTS = Case("wide", (1500, 0, 40), (1, 0, 1), 40, 1, 576, 0, block_size=64, latent=512)


@pytest.mark.parametrize(
    ("dtype", "kv_format"), [("bfloat16", "bfloat16"), ("float16", "fp8_e4m3"), ("float32", "int8")]
)
def test_latents_as_wide_as_models_have_them(dtype, kv_format):
    Problem(WIDE_LATENTS, dtype, kv_format=kv_format).assert_decode_is_right(impl=IMPL)


def test_one_scale_of_the_latents_is_that_of_keys_and_values():
    problem = Problem(Case("scale", (37, 150), (2, 1), 6, 1, 14, 0, window=60, latent=10), kv_format="int8")
    problem.pages = problem.pages.replace(k_scale=jnp.asarray([[jnp.nan], [0.03]], jnp.float32))
    both_are_right(problem)


def test_a_chunk_longer_than_a_piece_has_tiles_that_need_no_mask():
    Problem(Case("long", (530, 200), (170, 130), 2, 1, window=300)).assert_ragged_is_right(num_padding=56, impl=IMPL)


def test_rows_put_in_order_of_length_give_the_same():
    (case,) = (case for case in CASES if case.name == "verify-tree")
    problem = Problem(case)
    rows = problem.uniform()
    out = problem.run(decode_attention, problem.q, rows.replace(pieces=by_length(rows)), impl=IMPL)
    close(out, problem.expected(), "float32")


def test_a_large_scale_beside_a_small_one_loses_nothing_in_float16():
    problem = Problem(Case("scales", (40, 9), (1, 1)), "float16", kv_format="int8")
    factors = np.geomspace(1e-3, 10, problem.pages.v_scale.size).reshape(problem.pages.v_scale.shape)
    problem.pages = problem.pages.replace(v_scale=problem.pages.v_scale * jnp.asarray(factors, jnp.float32))
    out, expected = problem.run_decode(impl=IMPL), problem.expected()
    np.testing.assert_allclose(out, expected, atol=3e-3 * np.abs(expected).max())


ROW = st.tuples(st.integers(0, 9), st.integers(0, 70))
SIZES = {
    "head_dim": st.sampled_from([16, 24]),
    "v_head_dim": st.sampled_from([8, 40]),
    "block_size": st.sampled_from([4, 16, 24]),
    "window": st.sampled_from([0, 1, 5, 100]),
    "softcap": st.sampled_from([0.0, 2.0]),
    "sinks": st.booleans(),
}


@settings(max_examples=4, deadline=None, derandomize=True)
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
        problem.assert_decode_is_right(impl=IMPL)
    else:
        problem.assert_ragged_is_right(num_padding=seed % 3, impl=IMPL)


@pytest.mark.parametrize(
    ("width", "widest", "parts"),
    [
        (16, 256, ((0, 32),)),
        (40, 256, ((0, 64),)),
        (80, 256, ((0, 64), (64, 32))),
        (96, 256, ((0, 64), (64, 32))),
        (112, 256, ((0, 128),)),
        (128, 256, ((0, 128),)),
        (192, 256, ((0, 128), (128, 64))),
        (192, 64, ((0, 64), (64, 64), (128, 64))),
        (112, 64, ((0, 64), (64, 32), (96, 32))),
    ],
)
def test_a_head_is_cut_into_powers_of_two(width, widest, parts):
    assert parts_of(width, widest) == parts


def test_a_sequence_has_the_same_sums_alone_and_beside_others_under_a_wider_table():
    lens = (1300, 40, 700, 0, 513, 1)
    problem = Problem(Case("together", lens, tuple(min(1, length) for length in lens), 6, 2, 16, 16), "bfloat16")
    together = np.asarray(problem.run_decode(impl=IMPL).astype(jnp.float32))
    rows = problem.uniform()
    for row, length in enumerate(lens):
        width = -(-length // 16) or 1
        alone = SequenceRows(
            rows.block_tables[row : row + 1, :width], *(x[row : row + 1] for x in (rows.kv_lens, rows.query_lens)),
            jnp.zeros(1, jnp.int32), 1,
        )  # fmt: skip
        out = problem.run(decode_attention, problem.q[row : row + 1], alone, impl=IMPL)
        np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32))[0], together[row])


def test_pasts_are_split_by_position_alone():
    problem = Problem(Case("alone", (40,), (1,), 8, 2))

    def splits(num_sequences, table_width):
        rows = problem.uniform().replace(block_tables=jnp.zeros((num_sequences, table_width), jnp.int32))
        return tiling_for(problem.q[0], problem.pages, rows, ragged=False).splits

    assert [splits(1, 1024), splits(256, 1024), splits(1, 32), splits(1, 33)] == [20, 20, 1, 2]
    assert [split_start(index, 512) for index in (0, 1, 16, 17, 32, 33)] == [0, 512, 8192, 10240, 40960, 49152]
    assert num_splits(131072, 512) == 43
    assert [split_tokens_for(rows) for rows in (1, 8, 9, 16, 32, 33)] == [512, 512, 1024, 1024, 2048, 4096]


@pytest.mark.parametrize("table", [IMPLEMENTATIONS, RAGGED_IMPLEMENTATIONS])
def test_what_the_kernel_does_not_serve_is_an_error_and_not_a_slow_answer(table):
    assert choose("attention", table, "cuda", **FACTS).__module__.endswith("triton")
    for facts, message in (
        ({"dtype": "float64"}, r"dtype=float64 of the queries is none of \('bfloat16', 'float16', 'float32'\)"),
        ({"head_dim": 320}, "a head of 320 numbers is above the 256"),
        ({"head_dim": 704, "latent": 640}, "a head of 704 numbers is above the 640"),
        ({"kv_format": "int8", "pool_codes": 3 << 30}, "3221225472 codes of a byte lie between 2 and 4 GiB"),
    ):
        with pytest.raises(DispatchError, match=message + ".*xla: on cuda it runs only if asked for.*impl='xla'"):
            choose("attention", table, "cuda", **{**FACTS, **facts})
        assert choose("attention", table, "cuda", "xla", **{**FACTS, **facts}).__module__.endswith("xla")


def test_interpretation_runs_only_if_asked_for():
    names = [row.name for row in IMPLEMENTATIONS if not row.declines("cpu", False, FACTS)]
    assert names == ["cpu", "xla"]
