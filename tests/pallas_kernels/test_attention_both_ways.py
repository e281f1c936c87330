# SPDX-License-Identifier: Apache-2.0
"""New tokens that all see each other, as a block that is drafted at once does: a tree's bits need not end at a token's
own."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES
from tests.pallas_kernels.problems import Problem

CASE = replace(next(case for case in CASES if case.name == "verify-tree"), name="verify-block")
HOW = {
    "cpu": {},
    "xla": {"impl": "xla"},
    "triton": {"impl": "triton-interpreted"},
    "mosaic_tpu": {"impl": "mosaic_tpu-interpreted"},
}


@pytest.mark.parametrize("impl", HOW)
def test_every_new_token_sees_every_other(impl):
    problem = Problem(CASE)
    bits = (1 << np.asarray(CASE.query_lens)) - 1
    problem.tree = jnp.asarray(np.repeat(bits[:, None], problem.query_width, axis=1), jnp.int32)
    problem.assert_decode_is_right(**HOW[impl])
