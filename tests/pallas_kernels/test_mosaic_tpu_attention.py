# SPDX-License-Identifier: Apache-2.0
"""The TPU's kernel, interpreted on the CPU, against the reference, with NaN in all memory that nobody owns.

The interpreter lets copies arrive as late as they may, fills fresh memory with NaN, and fails on races between copies
and loads.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.paged_attention.cases import BLOCK_SIZES, CASES, HEAD_DIMS, HEADS, KV_FORMATS, LATENT_CASES, Case
from pallas_kernels.paged_attention.mosaic_tpu_sizes import TILE_TOKENS, tiling_for
from pallas_kernels.paged_attention.op import IMPLEMENTATIONS, RAGGED_IMPLEMENTATIONS
from tests.pallas_kernels.problems import LAYER, Problem, close

IMPL = "mosaic_tpu-interpreted"
FACTS = {
    **{"head_dim": 128, "v_head_dim": 128, "latent": 0, "dtype": "bfloat16", "kv_format": "bfloat16"},
    "pool_codes": 1 << 20,
}
SERVED_FORMATS = [name for name in KV_FORMATS if name != "float16"]
# Each compiles a program of a thousand small operations: these cross each branch once, a slow sweep takes the rest.
QUICK = (
    "decode-many-N9-K3",
    "decode-long-window",
    "verify-many-window",
    "verify-tree-window-sinks",
    "prefill-past-window",
)
SLOW_LATENTS = ((1, "fp8_e4m3"), (2, "bfloat16"), (3, "int8"))
LATENTS = {case.name.removeprefix("latent-"): case for case in LATENT_CASES}


def is_right(problem: Problem) -> None:
    """By the entry point that a case is named after, by equal rows if by none."""
    if problem.case.name.startswith("prefill"):
        problem.assert_ragged_is_right(impl=IMPL)
    else:
        problem.assert_decode_is_right(impl=IMPL)


def marked(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked([case.name for case in CASES], QUICK))
def test_named_cases_agree_with_the_reference(name):
    is_right(Problem(next(case for case in CASES if case.name == name)))


@pytest.mark.parametrize("name", marked(["decode", "prefill"], ["decode"]))
@pytest.mark.parametrize("kv_format", marked(SERVED_FORMATS, ["int8", "fp8_e4m3"]))
def test_keys_and_values_in_every_format(name, kv_format):
    case = Case(name, (37, 0, 90), (3, 0, 2), 8, 4, 24, 40, window=60, sinks=True)
    is_right(Problem(case, "bfloat16", kv_format=kv_format))


@pytest.mark.parametrize("name", marked(["decode", "prefill"], ["decode"]))
def test_scales_of_heads(name):
    problem = Problem(Case(name, (137, 139, 150), (1, 130, 1), 6, 2), kv_format="int8")
    k_scale, v_scale = (jnp.asarray([[jnp.nan] * 2, pair], jnp.float32) for pair in ([0.01, 0.03], [0.02, 0.005]))
    problem.pages = problem.pages.replace(k_scale=k_scale, v_scale=v_scale)
    is_right(problem)


@pytest.mark.parametrize("widths", marked(HEAD_DIMS, [(192, 128)]), ids=str)
def test_every_head_width(widths):
    is_right(Problem(Case("decode", (70, 3), (2, 3), 4, 2, *widths), "bfloat16"))


@pytest.mark.parametrize("kv_format", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_lone_head_is_read_without_its_axis(kv_format):
    case = Case("lone", (300, 0, 37), (2, 0, 1), 4, 1, 64, 48, block_size=32, window=150, sinks=True)
    Problem(case, "bfloat16", kv_format=kv_format).assert_decode_is_right(impl=IMPL)


@pytest.mark.parametrize("name", marked(LATENTS, ["verify", "prefill"]))
def test_values_that_are_a_part_of_the_keys(name):
    is_right(Problem(replace(LATENTS[name], name=name)))


@pytest.mark.parametrize(
    ("kv_heads", "kv_format"), [(1, "int8"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_LATENTS)]
)
def test_latents_in_narrow_formats_and_of_several_heads(kv_heads, kv_format):
    case = Case("latent", (300, 0, 37), (2, 0, 1), 6, kv_heads, 72, 0, block_size=32, window=150, sinks=True, latent=48)
    is_right(Problem(case, "bfloat16", kv_format=kv_format))


@pytest.mark.parametrize("heads", marked(HEADS, [(8, 1)]), ids=str)
def test_every_ratio_of_heads(heads):
    is_right(Problem(Case("prefill", (40, 21), (30, 2), *heads), "bfloat16"))


@pytest.mark.parametrize("block_size", marked([*BLOCK_SIZES, 48], [48]))
def test_every_block_size(block_size):
    is_right(Problem(Case("decode", (600, 17), (1, 1), block_size=block_size, window=550)))


@pytest.mark.slow
def test_a_chunk_longer_than_a_piece():
    Problem(Case("long", (530, 200), (170, 130), 2, 1, window=300)).assert_ragged_is_right(num_padding=56, impl=IMPL)


# The other interpreter finds no races, but loads heads with a stride from words of 32 bits, as a TPU does.
@pytest.mark.parametrize("kv_format", marked(SERVED_FORMATS, ["bfloat16", "int8"]))
def test_heads_are_picked_out_of_words(kv_format):
    problem = Problem(Case("words", (37, 9, 70), (2, 0, 1), 8, 4), kv_format=kv_format)
    assert tiling_for(problem.q, problem.pages).direct

    def attend(q, pages, rows):
        return mosaic_tpu.attend(q, pages, LAYER, rows, problem.params, interpret=True)

    close(jax.jit(attend)(problem.q, problem.pages, problem.uniform()), problem.expected(), "float32")


ROW = st.tuples(st.integers(0, 9), st.integers(0, 70))
SIZES = {
    "head_dim": st.sampled_from([16, 24]),
    "v_head_dim": st.sampled_from([8, 40]),
    "block_size": st.sampled_from([4, 16, 24]),
    "window": st.sampled_from([0, 1, 5, 100]),
    "softcap": st.sampled_from([0.0, 2.0]),
    "sinks": st.booleans(),
}


def drawn(examples):
    def decorate(test):
        return settings(max_examples=examples, deadline=None, derandomize=True)(
            given(
                rows=st.lists(ROW, min_size=1, max_size=4).filter(lambda rows: any(query for query, _ in rows)),
                heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
                sizes=st.fixed_dictionaries(SIZES),
                seed=st.integers(0, 99),
            )(test)
        )

    return decorate


def agrees(rows, heads, sizes, seed):
    query_lens = tuple(query for query, _ in rows)
    kv_lens = tuple(query + past if query else 0 for query, past in rows)
    num_kv_heads, group = heads
    problem = Problem(Case("drawn", kv_lens, query_lens, num_kv_heads * group, num_kv_heads, **sizes), "float32", seed)
    if seed % 2:
        problem.assert_decode_is_right(impl=IMPL)
    else:
        problem.assert_ragged_is_right(num_padding=seed % 3, impl=IMPL)


@drawn(3)
def test_any_shape_agrees_with_the_reference(rows, heads, sizes, seed):
    agrees(rows, heads, sizes, seed)


@pytest.mark.slow
@drawn(25)
def test_many_shapes_agree_with_the_reference(rows, heads, sizes, seed):
    agrees(rows, heads, sizes, seed)


def test_a_row_whose_values_are_not_finite_spoils_no_other():
    """What one row leaves in the buffers lies there under the tiles of shorter rows."""
    problem = Problem(Case("poison", (600, 9, 40), (1, 1, 1)))
    poisoned = problem.tables[0][:38]
    problem.pages = problem.pages.replace(v=problem.pages.v.at[:, poisoned].set(jnp.nan))
    out = problem.run_decode(impl=IMPL)
    assert jnp.isnan(out[0]).all()
    close(out[1:], problem.expected()[1:], "float32")


def test_many_query_rows_are_cut_to_what_fits():
    wide = jax.ShapeDtypeStruct((4, 128, 64, 256), jnp.float32)
    pages = Problem(Case("wide", (33,), (1,), 64, 8, 256, 256)).pages
    tiling = tiling_for(wide, pages)
    assert not tiling.together
    assert tiling.query_len == 64 and tiling.rows == 64 * 8
    assert tiling_for(wide.update(shape=(4, 1, 64, 256)), pages).query_len == 1


def test_a_tile_is_as_many_tokens_as_fit_the_buffers():
    def tokens(heads, width, dtype, block_size=16):
        q = jax.ShapeDtypeStruct((4, 1, heads, width), jnp.bfloat16)
        pages = Problem(Case("tile", (3,), (1,), heads, heads, width, width, block_size), dtype).pages
        return tiling_for(q, pages).tile_tokens

    assert tokens(8, 128, "bfloat16") == TILE_TOKENS
    assert tokens(16, 256, "float32") == 128
    assert tokens(1, 64, "bfloat16", 48) == 480
    assert tokens(16, 256, "float32", 256) == 256


@pytest.mark.parametrize(
    ("heads", "kv_format", "strided"),
    [
        *((8, "bfloat16", True), (2, "bfloat16", True), (6, "bfloat16", False), (1, "bfloat16", True)),
        *((4, "int8", True), (2, "int8", False), (1, "float32", True), (3, "float32", False)),
    ],
)
def test_heads_are_loaded_with_a_stride_where_no_padding_lies_between_them(heads, kv_format, strided):
    problem = Problem(Case("heads", (3,), (1,), heads, heads), kv_format=kv_format)
    assert tiling_for(problem.q, problem.pages).strided == strided


@pytest.mark.parametrize("table", [IMPLEMENTATIONS, RAGGED_IMPLEMENTATIONS])
def test_what_the_kernel_does_not_serve_is_an_error_and_not_a_slow_answer(table):
    assert choose("attention", table, "tpu", **FACTS).__module__.endswith("mosaic_tpu")
    for facts, message in (
        ({"dtype": "float16"}, "dtype='float16' cannot be loaded by a TPU"),
        ({"kv_format": "float16"}, "kv_format='float16' cannot be loaded by a TPU"),
    ):
        with pytest.raises(DispatchError, match=message + ".*xla: on tpu it runs only if asked for.*impl='xla'"):
            choose("attention", table, "tpu", **{**FACTS, **facts})
