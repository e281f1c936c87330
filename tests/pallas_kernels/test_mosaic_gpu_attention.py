# SPDX-License-Identifier: Apache-2.0
"""Hopper's prefill kernel with its warpgroups, barriers and pages simulated on the CPU, against the reference."""

import pytest

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.op import RAGGED_IMPLEMENTATIONS
from tests.pallas_kernels.problems import Problem

IMPL = "mosaic_gpu-interpreted"
FACTS = {
    **{"head_dim": 128, "v_head_dim": 128, "latent": 0},
    **{"dtype": "bfloat16", "kv_format": "bfloat16", "block_size": 16},
}


def test_a_chunk_with_a_past_of_several_tiles_agrees_with_the_reference():
    case = Case("past", (300,), (30,), 1, 1, 64, 64)
    Problem(case, "bfloat16").assert_ragged_is_right(num_padding=3, impl=IMPL)


# A program of three loops takes XLA a minute to compile as it is interpreted.
@pytest.mark.slow
def test_chunks_with_a_window_and_sinks_agree_with_the_reference():
    case = Case("window", (300, 0, 20), (30, 0, 20), 2, 1, 64, 64, window=200, softcap=5.0, sinks=True)
    Problem(case, "bfloat16").assert_ragged_is_right(impl=IMPL)


@pytest.mark.slow
def test_a_chunk_longer_than_a_piece_over_large_blocks_agrees_with_the_reference():
    case = Case("long", (150,), (140,), 1, 1, 128, 64, block_size=256)
    Problem(case, "float16").assert_ragged_is_right(num_padding=0, impl=IMPL)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dtype": "float32"}, "dtype=float32 of the queries is none of"),
        ({"kv_format": "int8"}, "kv_format=int8 is not bfloat16"),
        ({"head_dim": 80}, "head_dim=80 is not a multiple of 64 up to 192"),
        ({"v_head_dim": 192}, "v_head_dim=192 is not a multiple of 64 up to 128"),
        ({"block_size": 48}, "block_size=48 is none of"),
    ],
)
def test_what_it_does_not_serve_is_named(facts, message):
    assert choose("attention", RAGGED_IMPLEMENTATIONS, "cuda", "mosaic_gpu", **FACTS)
    with pytest.raises(DispatchError, match=message):
        choose("attention", RAGGED_IMPLEMENTATIONS, "cuda", "mosaic_gpu", **{**FACTS, **facts})
