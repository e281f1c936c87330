# SPDX-License-Identifier: Apache-2.0
"""Every case against the reference, with NaN in the weights of empty groups and in rows that belong to none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.activations import ACTIVATIONS, Activation
from pallas_kernels.dispatch import DispatchError
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.cases import CASES, CLAMPED, SQUARED, SWIGLU, Case
from pallas_kernels.grouped_matmul.op import grouped_matmul

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


class Problem:
    """Random inputs of a case; whatever no row's result may depend on is NaN."""

    def __init__(self, case: Case, dtype: str = "float32", seed: int = 0):
        rng = np.random.default_rng(seed)
        sizes, width, depth = case.group_sizes, case.width, case.depth
        rows = rng.normal(size=(sum(sizes) + case.spare, depth))
        rows[sum(sizes) :] = np.nan
        weights = rng.normal(size=(len(sizes), width, depth)) / np.sqrt(depth)
        bias = rng.normal(size=(len(sizes), width))
        for expert, size in enumerate(sizes):
            if not size:
                weights[expert] = bias[expert] = np.nan
        self.case = case
        self.x, self.weights = jnp.asarray(rows, dtype), jnp.asarray(weights, dtype)
        self.bias = jnp.asarray(bias, dtype) if case.bias else ()
        self.sizes = jnp.asarray(sizes, jnp.int32)

    def result(self, impl: str = "auto"):
        call = jax.jit(
            lambda *inputs: grouped_matmul(*inputs[:3], "cpu", inputs[3], activation=self.case.activation, impl=impl)
        )
        return call(self.x, self.weights, self.sizes, self.bias)

    def assert_is_right(self, impl: str = "auto"):
        got = self.result(impl)
        assert got.dtype == self.x.dtype
        expected = reference.matmul(self.x, self.weights, self.sizes, self.bias, self.case.activation)
        tolerance = TOLERANCE[str(self.x.dtype)] * max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_agree_with_the_reference(case, dtype):
    Problem(case, dtype).assert_is_right()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_of_the_gpu_agree_with_the_reference(case):
    Problem(case).assert_is_right("triton-interpreted")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_of_the_tpu_agree_with_the_reference(case, dtype):
    halves = 2 if case.activation and case.activation.gated else 1
    Problem(replace(case, width=256 * halves, depth=128), dtype).assert_is_right("mosaic_tpu-interpreted")


def test_programs_of_the_tpu_decline_what_their_tiles_do_not_divide():
    with pytest.raises(DispatchError, match="inputs or outputs of 36 are no multiple of 128"):
        Problem(CASES[0]).result("mosaic_tpu-interpreted")


def test_programs_of_the_gpu_in_bfloat16_too():
    Problem(CASES[2], "bfloat16").assert_is_right("triton-interpreted")


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    spare=st.integers(0, 5),
    width=st.sampled_from([2, 6, 34]),
    depth=st.sampled_from([1, 5, 33]),
    bias=st.booleans(),
    activation=st.sampled_from([None, SWIGLU, CLAMPED, SQUARED]),
)
def test_drawn_groups_agree_with_the_reference(sizes, spare, width, depth, bias, activation):
    if sum(sizes) + spare:
        Problem(Case("drawn", tuple(sizes), width, depth, spare, bias, activation)).assert_is_right()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_the_reference_s(name):
    for gated in (False, True):
        case = Case(name, (3, 0, 4), activation=Activation(name, gated, limit=1.5, slope=1.3, shift=0.25 * gated))
        Problem(case).assert_is_right()


def test_a_row_is_the_same_whatever_its_neighbours_are():
    problem = Problem(Case("neighbours", (9, 30, 0, 25), 34, 40, activation=SWIGLU))
    first = np.asarray(problem.result())
    rng = np.random.default_rng(5)
    for group in (slice(9, 39), slice(39, 64)):
        problem.x = problem.x.at[group].set(jnp.asarray(rng.normal(size=(group.stop - group.start, 40)), jnp.float32))
    problem.x = problem.x.at[50].set(jnp.nan)
    again = np.asarray(problem.result())
    np.testing.assert_array_equal(again[:9], first[:9])
    assert np.isnan(again).any(axis=1).nonzero()[0].tolist() == [50]


def test_an_unknown_implementation_is_named():
    problem = Problem(CASES[0])
    with pytest.raises(DispatchError, match="'cutlass' is not one of grouped_matmul's implementations"):
        problem.result("cutlass")
