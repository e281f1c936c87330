# SPDX-License-Identifier: Apache-2.0
"""Every case, implementation by implementation, against the reference, with NaN in all memory that nobody owns."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.paged_attention.cases import CASES, KV_FORMATS, LATENT_CASES, Case
from pallas_kernels.paged_attention.op import IMPLEMENTATIONS, by_length, decode_attention
from tests.pallas_kernels.problems import LAYER, Problem
from tests.sometimes import mostly_slow

UNTREED = [case for case in CASES if not case.tree]
# What runs with every change: of ragged rows and of narrow numbers one case for each way through the code.
RAGGED = ("decode-many-N9-K3", "verify-many-window", "prefill-past", "prefill-past-window", "prefill-sinks-N8-K2")
NARROW = ("decode-N9-K3-H24-Hv40", "verify-tree-window-sinks", "prefill-past-window")


def name_of(case):
    """The name of a case."""
    return case.name


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equal_rows_agree_with_the_reference(case):
    Problem(case, "float32").assert_decode_is_right()


@pytest.mark.parametrize("case", mostly_slow(UNTREED, RAGGED, name_of))
def test_ragged_chunks_agree_with_the_reference(case):
    Problem(case, "float32").assert_ragged_is_right(num_padding=5)


# Each compiles a program: the entry point that a case is named after is enough.
@pytest.mark.parametrize("case", mostly_slow(CASES, NARROW, name_of))
def test_in_bfloat16_too(case):
    problem = Problem(case, "bfloat16")
    if case.name.startswith("prefill"):
        problem.assert_ragged_is_right(num_padding=5)
    else:
        problem.assert_decode_is_right()


@pytest.mark.parametrize("kv_format", mostly_slow(KV_FORMATS, ("bfloat16", "fp8_e4m3", "int8")))
@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_keys_and_values_in_every_format(kv_format, impl):
    case = Case("formats", (37, 0, 150), (3, 0, 2), 6, 2, 24, 40, window=60, sinks=True)
    Problem(case, kv_format=kv_format).assert_decode_is_right(impl=impl)
    Problem(case, kv_format=kv_format).assert_ragged_is_right(impl=impl)


@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_scales_of_heads(impl):
    problem = Problem(Case("scales", (37, 9, 150), (1, 1, 1), 6, 2), kv_format="int8")
    k_scale, v_scale = (jnp.asarray([[jnp.nan] * 2, pair], jnp.float32) for pair in ([0.01, 0.03], [0.02, 0.005]))
    problem.pages = problem.pages.replace(k_scale=k_scale, v_scale=v_scale)
    problem.assert_decode_is_right(impl=impl)
    problem.assert_ragged_is_right(impl=impl)


@pytest.mark.parametrize("impl", ["cpu", "xla"])
@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_values_that_are_a_part_of_the_keys(case, impl):
    Problem(case).assert_decode_is_right(impl=impl)
    Problem(case).assert_ragged_is_right(num_padding=5, impl=impl)


def test_values_that_are_a_part_of_the_keys_have_no_pages_of_their_own():
    latent, plain = Problem(LATENT_CASES[0]), Problem(CASES[0])
    for problem, params, message in (
        (
            latent,
            replace(latent.params, latent=0),
            "latent=0 numbers of a key of 14 .* none of their own",
        ),
        (latent, replace(latent.params, latent=15), "latent=15 numbers of a key of 14"),
        (plain, replace(plain.params, latent=8), "latent=8 numbers of a key of 16 .* pages that have values"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(problem.q, problem.pages, LAYER, problem.uniform(), params, "cpu")


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
        decode_attention(problem.q[:, :, :3], problem.pages, LAYER, problem.uniform(), problem.params, "cpu")


def test_sizes_that_contradict_each_other_are_refused_with_their_numbers():
    problem = Problem(CASES[0], "float32")
    rest = (LAYER, problem.uniform(), problem.params, "cpu")
    with pytest.raises(ValueError, match="head_dim=12 of the queries is not the 16"):
        decode_attention(problem.q[..., :12], problem.pages, *rest)
    with pytest.raises(ValueError, match=r"sinks of shape \(3,\) are not one for each of num_heads=4"):
        decode_attention(problem.q, problem.pages, *rest, jnp.zeros(3))
    tree = Problem(Case("tree", (40,), (5,), window=4, tree=True))
    with pytest.raises(ValueError, match="window=4 is shorter than a tree's 5"):
        decode_attention(tree.q, tree.pages, LAYER, tree.uniform(), tree.params, "cpu")
    wide = Problem(Case("wide", (40,), (32,), tree=True))
    with pytest.raises(ValueError, match="a tree of 32 new tokens a row is above the 31"):
        decode_attention(wide.q, wide.pages, LAYER, wide.uniform(), wide.params, "cpu")


def test_an_unknown_platform_or_implementation_is_named():
    with pytest.raises(DispatchError, match="not metal"):
        choose("paged_attention", IMPLEMENTATIONS, "metal")
    with pytest.raises(DispatchError, match="impl='cuda-graph'"):
        choose("paged_attention", IMPLEMENTATIONS, "cpu", "cuda-graph")
