# SPDX-License-Identifier: Apache-2.0
"""The causal convolution against its reference, with NaN in all memory that nobody owns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.causal_conv1d import reference
from pallas_kernels.causal_conv1d.cases import CASES, Case
from pallas_kernels.causal_conv1d.op import conv_ragged, conv_rows
from tests.pallas_kernels.recurrent_problems import (
    LAYER,
    LAYERS,
    assert_in_place,
    assert_only_own_slots_changed,
    owned,
    state_rows,
)

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
run_rows = jax.jit(conv_rows, static_argnames=("silu", "platform", "impl"))
run_ragged = jax.jit(conv_ragged, static_argnames=("silu", "platform", "impl"))


class Problem:
    """A case's arrays; `num_padding` tokens of NaN follow the ragged ones."""

    def __init__(self, case: Case, dtype: str = "float32", seed: int = 0, num_padding: int = 0):
        rng = np.random.default_rng(seed)
        self.case, self.dtype = case, jnp.dtype(dtype)
        self.weight = jnp.asarray(rng.normal(size=(case.width, case.channels)), jnp.float32)
        self.bias = jnp.asarray(rng.normal(size=case.channels), jnp.float32) if case.bias else ()
        self.ragged = state_rows(case.starts, case.query_lens, case.num_pending, 0)
        slots = 2 + len(case.starts)
        shape = (LAYERS, slots, case.width - 1, case.channels)
        self.tail = owned(rng, shape, dtype, self.ragged)
        shape = (LAYERS, slots, case.pending, case.channels)
        self.pending = owned(rng, shape, dtype, self.ragged, pending=True) if case.pending else ()
        tokens = rng.normal(size=(sum(case.query_lens), case.channels))
        self.flat = jnp.asarray(np.concatenate([tokens, np.full((num_padding, case.channels), np.nan)]), self.dtype)
        self.rows_x = jnp.asarray(rng.normal(size=(len(case.starts), 1 + case.pending, case.channels)), self.dtype)

    def arguments(self, x, rows):
        return x, self.weight, self.bias, self.tail, self.pending, LAYER, rows, self.case.silu

    def assert_close(self, found, expected):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[self.dtype.name])

    def assert_ragged_is_right(self):
        out, tail = run_ragged(*self.arguments(self.flat, self.ragged), platform="cpu")
        want, want_tail = reference.conv_ragged(*self.arguments(self.flat, self.ragged))
        count = sum(self.case.query_lens)
        self.assert_close(out[:count], want[:count])
        self.assert_storage(self.tail, tail, want_tail, self.ragged)

    def assert_rows_are_right(self, impl: str = "auto"):
        case, width = self.case, self.rows_x.shape[1]
        lens = tuple(min(length, width) for length in case.query_lens)
        rows = state_rows(case.starts, lens, case.num_pending, width)
        out, tail, pending = run_rows(*self.arguments(self.rows_x, rows), platform="cpu", impl=impl)
        want, want_tail, want_pending = reference.conv_rows(*self.arguments(self.rows_x, rows))
        used = np.asarray(lens) > 0
        self.assert_close(out[used], want[used])
        self.assert_storage(self.tail, tail, want_tail, rows)
        if case.pending:
            assert_only_own_slots_changed(self.pending, pending, rows)
            for slot, length in zip(np.asarray(rows.slots), lens, strict=True):
                drafts = (LAYER, slot, slice(max(length - 1, 0)))
                self.assert_close(pending[drafts], want_pending[drafts])

    def assert_storage(self, before, after, want, rows):
        assert_only_own_slots_changed(before, after, rows)
        own = [slot for slot in np.asarray(rows.slots) if slot]
        self.assert_close(after[LAYER, own], want[LAYER, own])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_rows_agree_with_the_reference(case, dtype):
    Problem(case, dtype, num_padding=5).assert_ragged_is_right()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_rows_agree_with_the_reference(case, dtype):
    Problem(case, dtype).assert_rows_are_right()


@pytest.mark.parametrize(("name", "dtype"), [("shorter-than-the-taps", "float32"), ("pending", "bfloat16")])
def test_programs_of_the_gpu_agree_with_the_reference(name, dtype):
    problem = Problem(next(case for case in CASES if case.name == name), dtype)
    problem.assert_rows_are_right("triton-interpreted")


ROW = st.tuples(st.integers(0, 9), st.integers(0, 70), st.integers(0, 3))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4).filter(lambda rows: any(query for query, _, _ in rows)),
    pending=st.integers(0, 3),
    sizes=st.fixed_dictionaries({"channels": st.integers(1, 9), "width": st.integers(2, 6), "silu": st.booleans()}),
    seed=st.integers(0, 99),
)
def test_any_shape_agrees_with_the_reference(rows, pending, sizes, seed):
    starts = tuple(start for _, start, _ in rows)
    waiting = tuple(min(count, pending, start) for _, start, count in rows)
    case = Case("drawn", starts, tuple(query for query, _, _ in rows), waiting, pending=pending, **sizes)
    problem = Problem(case, seed=seed, num_padding=seed % 3)
    problem.assert_rows_are_right()
    if seed % 4 == 0:
        problem.assert_rows_are_right("triton-interpreted")
    problem.assert_ragged_is_right()


def test_a_row_is_the_same_alone_and_beside_others_and_inputs_that_are_not_there_reach_nothing():
    problem = Problem(Case("beside", (9, 3, 70), (1, 2, 4), (1, 0, 3), channels=700, pending=3))
    rows = state_rows((9, 3, 70), (1, 2, 4), (1, 0, 3), 4)
    problem.rows_x = problem.rows_x.at[0, 1:].set(jnp.nan).at[1, 2:].set(jnp.nan)
    impl = {"platform": "cpu", "impl": "triton-interpreted"}
    together = run_rows(*problem.arguments(problem.rows_x, rows), **impl)
    one = jax.tree.map(lambda part: part[1:2], rows)
    alone = run_rows(*problem.arguments(problem.rows_x[1:2], one), **impl)
    np.testing.assert_array_equal(alone[0][0, :2], together[0][1, :2])
    assert not np.isnan(np.asarray(together[0][0, 0])).any()
    slot = int(one.slots[0])
    for found, expected in zip(alone[1:], together[1:], strict=True):
        np.testing.assert_array_equal(found[:, slot], expected[:, slot])


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4), (63,), (64, 65)])
def test_a_prompt_gives_the_same_however_it_is_cut(cuts):
    problem = Problem(Case("whole", (0,), (70,), (0,)))
    whole, tail = run_ragged(*problem.arguments(problem.flat, problem.ragged), platform="cpu")
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, 70), strict=True):
        rows = state_rows((begin,), (end - begin,), (0,), 0)
        out, problem.tail = run_ragged(*problem.arguments(problem.flat[begin:end], rows), platform="cpu")
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(problem.tail[LAYER, 1], tail[LAYER, 1])


def test_the_tails_are_written_in_place():
    problem = Problem(Case("large", (9, 3), (1, 4), (1, 2), channels=512, pending=3))
    shapes = [(LAYERS, 64, 3, 512)] * 2
    storage = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

    def ragged(storage, x, rows):
        out, tail = conv_ragged(x, problem.weight, (), *storage, LAYER, rows, True, "cpu")
        return (tail, storage[1]), out

    def equal(storage, x, rows):
        out, *storage = conv_rows(x, problem.weight, (), *storage, LAYER, rows, True, "cpu")
        return tuple(storage), out

    assert_in_place(ragged, storage, problem.flat, problem.ragged)
    assert_in_place(equal, storage, problem.rows_x, state_rows((9, 3), (1, 4), (1, 2), 4))


def test_sizes_that_do_not_fit_are_named():
    problem = Problem(CASES[0])
    x, weight, bias, tail, pending, *rest = problem.arguments(problem.flat, problem.ragged)
    with pytest.raises(ValueError, match="do not fit taps"):
        conv_ragged(x, weight[1:], bias, tail, pending, *rest, "cpu")
    with pytest.raises(ValueError, match="keep the tail in the inputs' dtype"):
        conv_ragged(x, weight, bias, tail.astype(jnp.bfloat16), pending, *rest, "cpu")
    with pytest.raises(ValueError, match="draft fewer"):
        conv_rows(problem.flat[None, :3], weight, bias, tail, pending, *rest, "cpu")
