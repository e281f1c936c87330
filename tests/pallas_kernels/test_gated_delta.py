# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against its reference, with NaN in all memory that nobody owns."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_delta import reference
from pallas_kernels.gated_delta.cases import CASES, Case
from pallas_kernels.gated_delta.chunk import inverse
from pallas_kernels.gated_delta.op import DeltaTokens, delta_ragged, delta_rows
from tests.pallas_kernels.recurrent_problems import (
    LAYER,
    LAYERS,
    assert_in_place,
    assert_no_races,
    assert_only_own_slots_changed,
    owned,
    state_rows,
)

KERNELS = ("triton-interpreted", "mosaic_tpu-interpreted")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
run_rows = jax.jit(delta_rows, static_argnames=("platform", "impl"))
run_ragged = jax.jit(delta_ragged, static_argnames=("platform", "impl"))


class Draw:
    """Draws of tokens as layers make them: keys of length one, decays below zero, strengths up to two."""

    def __init__(self, case: Case, seed: int):
        self.case, self.rng = case, np.random.default_rng(seed)

    def unit(self, shape):
        array = self.rng.normal(size=shape)
        return array / np.linalg.norm(array, axis=-1, keepdims=True)

    def decays(self, shape):
        return -self.case.decay * self.rng.uniform(size=shape) ** 4

    def strengths(self, shape):
        return 2 * self.rng.uniform(size=shape)

    def shapes(self):
        case = self.case
        decays = (case.heads, case.rows) if case.per_channel else (case.heads,)
        return (case.key_heads, case.rows), (case.heads, case.columns), decays, (case.heads,)

    def tokens(self, *lead, padding=0) -> DeltaTokens:
        draws = (self.unit, self.rng.standard_normal, self.decays, self.strengths)
        arrays = [draw((*lead, *shape)) for draw, shape in zip(draws, self.shapes(), strict=True)]
        return DeltaTokens(*(self.padded(array, padding) for array in arrays))

    def padded(self, array, padding):
        return jnp.asarray(np.concatenate([array, np.full((padding, *array.shape[1:]), np.nan)]), jnp.float32)


class Problem:
    """A case's arrays; `num_padding` tokens of NaN follow the ragged ones."""

    def __init__(self, case: Case, dtype: str = "float32", seed: int = 0, num_padding: int = 0):
        draw = Draw(case, seed)
        self.case, self.dtype, self.draw = case, dtype, draw
        self.ragged = state_rows(case.starts, case.query_lens, case.num_pending, 0)
        lead = (LAYERS, 2 + len(case.starts))
        state_shape = (*lead, case.heads, case.rows, case.columns)
        self.matrix = owned(draw.rng, state_shape, dtype, self.ragged)
        draws = (draw.unit, draw.rng.standard_normal, draw.decays, draw.strengths)
        self.pending = ()
        if case.pending:
            waiting = [
                owned(draw.rng, (*lead, case.pending, *shape), "float32", self.ragged, True, one)
                for shape, one in zip(draw.shapes(), draws, strict=True)
            ]
            self.pending = DeltaTokens(*waiting)
        count, width = sum(case.query_lens), 1 + case.pending
        self.flat_q = draw.padded(draw.unit((count, case.key_heads, case.rows)), num_padding)
        self.flat = draw.tokens(count, padding=num_padding)
        self.rows_q = draw.padded(draw.unit((len(case.starts), width, case.key_heads, case.rows)), 0)
        self.rows = draw.tokens(len(case.starts), width)

    def assert_close(self, found, expected, dtype="float32"):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[dtype])

    def assert_ragged_is_right(self, impl="auto"):
        arguments = (self.flat_q, self.flat, self.matrix, self.pending, LAYER, self.ragged)
        out, matrix = jax.block_until_ready(run_ragged(*arguments, platform="cpu", impl=impl))
        if impl.startswith("mosaic_tpu"):
            assert_no_races()
        want, want_matrix = reference.delta_ragged(*arguments)
        count = sum(self.case.query_lens)
        self.assert_close(out[:count], want[:count])
        assert not np.asarray(out[count:]).any()
        self.assert_matrix(matrix, want_matrix, self.ragged)

    def assert_rows_are_right(self, impl="auto"):
        case, width = self.case, self.rows_q.shape[1]
        lens = tuple(min(length, width) for length in case.query_lens)
        rows = state_rows(case.starts, lens, case.num_pending, width)
        arguments = (self.rows_q, self.rows, self.matrix, self.pending, LAYER, rows)
        out, matrix, pending = jax.block_until_ready(run_rows(*arguments, platform="cpu", impl=impl))
        if impl.startswith("mosaic_tpu"):
            assert_no_races()
        want, want_matrix, want_pending = reference.delta_rows(*arguments)
        used = np.asarray(lens) > 0
        self.assert_close(out[used], want[used])
        self.assert_matrix(matrix, want_matrix, rows)
        if case.pending:
            for name, before in vars(self.pending).items():
                after = getattr(pending, name)
                assert_only_own_slots_changed(before, after, rows)
                for slot, length in zip(np.asarray(rows.slots), lens, strict=True):
                    drafts = (LAYER, slot, slice(max(length - 1, 0)))
                    self.assert_close(after[drafts], getattr(want_pending, name)[drafts])

    def assert_matrix(self, matrix, want, rows):
        assert matrix.dtype == jnp.dtype(self.dtype)
        assert_only_own_slots_changed(self.matrix, matrix, rows)
        own = [slot for slot in np.asarray(rows.slots) if slot]
        self.assert_close(matrix[LAYER, own], want[LAYER, own], self.dtype)


@pytest.mark.parametrize("impl", ["cpu", "xla", *KERNELS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_rows_agree_with_the_reference(case, impl):
    Problem(case, num_padding=5).assert_ragged_is_right(impl)


@pytest.mark.parametrize("impl", ["auto", "triton-interpreted", "mosaic_tpu-interpreted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_rows_agree_with_the_reference(case, impl):
    Problem(case).assert_rows_are_right(impl)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_kept_in_fewer_bits(dtype):
    case = next(case for case in CASES if case.name == "pending")
    Problem(case, dtype).assert_rows_are_right()
    Problem(case, dtype).assert_ragged_is_right()


ROW = st.tuples(st.integers(0, 9), st.integers(0, 70), st.integers(0, 3))


def drawn(examples):
    sizes = {
        "rows": st.integers(1, 9),
        "columns": st.integers(1, 9),
        "per_channel": st.booleans(),
        "decay": st.sampled_from([1e-3, 1.0, 50.0]),
    }

    def decorate(test):
        return settings(max_examples=examples, deadline=None, derandomize=True)(
            given(
                rows=st.lists(ROW, min_size=1, max_size=4).filter(lambda rows: any(query for query, _, _ in rows)),
                pending=st.integers(0, 3),
                heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
                sizes=st.fixed_dictionaries(sizes),
                seed=st.integers(0, 99),
            )(test)
        )

    return decorate


def drawn_problem(rows, pending, heads, sizes, seed):
    starts = tuple(start for _, start, _ in rows)
    waiting = tuple(min(count, pending, start) for _, start, count in rows)
    key_heads, group = heads
    lens = tuple(query for query, _, _ in rows)
    case = Case("drawn", starts, lens, waiting, key_heads, key_heads * group, pending=pending, **sizes)
    return Problem(case, seed=seed, num_padding=seed % 3)


@drawn(8)
def test_any_shape_agrees_with_the_reference(rows, pending, heads, sizes, seed):
    problem = drawn_problem(rows, pending, heads, sizes, seed)
    problem.assert_rows_are_right()
    problem.assert_ragged_is_right("xla" if seed % 2 else "cpu")


@pytest.mark.parametrize("impl", KERNELS)
@drawn(2)
def test_kernels_agree_with_the_reference(impl, rows, pending, heads, sizes, seed):
    drawn_problem(rows, pending, heads, sizes, seed).assert_ragged_is_right(impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", KERNELS)
@drawn(12)
def test_kernels_agree_with_the_reference_at_any_shape(impl, rows, pending, heads, sizes, seed):
    problem = drawn_problem(rows, pending, heads, sizes, seed)
    problem.assert_rows_are_right(impl)
    problem.assert_ragged_is_right(impl)


def part(tokens, begin, end):
    return jax.tree.map(lambda leaf: leaf[begin:end], tokens)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (64, 128), (63, 64, 65), (7, 100)])
def test_a_prompt_gives_the_same_however_it_is_cut(cuts, per_channel):
    assert_cuts_change_nothing(cuts, per_channel, "auto")


@pytest.mark.parametrize(("impl", "per_channel"), [(KERNELS[0], True), (KERNELS[1], False)])
def test_kernels_give_the_same_however_a_prompt_is_cut_at_chunks(impl, per_channel):
    assert_cuts_change_nothing((64,), per_channel, impl)


def assert_cuts_change_nothing(cuts, per_channel, impl):
    problem = Problem(Case("whole", (0,), (150,), (0,), per_channel=per_channel))
    q, tokens = problem.flat_q, problem.flat
    run = partial(run_ragged, platform="cpu", impl=impl)
    whole, matrix = run(q, tokens, problem.matrix, (), LAYER, problem.ragged)
    outs, state = [], problem.matrix
    for begin, end in zip((0, *cuts), (*cuts, 150), strict=True):
        rows = state_rows((begin,), (end - begin,), (0,), 0)
        out, state = run(q[begin:end], part(tokens, begin, end), state, (), LAYER, rows)
        outs.append(out)
    tolerance = 0 if all(cut % 64 == 0 for cut in cuts) else 1e-5
    np.testing.assert_allclose(np.concatenate(outs), whole, rtol=0, atol=tolerance)
    np.testing.assert_allclose(state[LAYER, 1], matrix[LAYER, 1], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("impl", "per_channel"),
    [
        *(("auto", False), ("auto", True), ("triton-interpreted", False), ("mosaic_tpu-interpreted", False)),
        *(pytest.param(impl, True, marks=pytest.mark.slow) for impl in KERNELS),
    ],
)
def test_a_sequence_gives_the_same_whatever_is_beside_it(impl, per_channel):
    case = Case("beside", (0, 64, 0, 7), (70, 3, 0, 130), (0, 0, 0, 0), per_channel=per_channel)
    problem = Problem(case, num_padding=9)
    run = partial(run_ragged, platform="cpu", impl=impl)
    out, matrix = run(problem.flat_q, problem.flat, problem.matrix, (), LAYER, problem.ragged)
    starts = np.asarray(problem.ragged.query_starts)
    for s in (0, 1, 3):
        begin, end = starts[s], starts[s] + case.query_lens[s]
        slot = int(problem.ragged.slots[s])
        rows = state_rows((case.starts[s],), (case.query_lens[s],), (0,), 0)
        rows = rows.replace(slots=jnp.asarray([slot], jnp.int32))
        tokens = part(problem.flat, begin, end)
        alone, state = run(problem.flat_q[begin:end], tokens, problem.matrix, (), LAYER, rows)
        np.testing.assert_array_equal(out[begin:end], alone)
        np.testing.assert_array_equal(matrix[LAYER, slot], state[LAYER, slot])


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_verifying_then_going_on_equals_decoding_token_by_token(accepted, per_channel):
    """Three drafts of which some stand, then a step without drafts, then one with drafts, then a prompt's chunk."""
    case = Case("decoded", (5,), (30,), (0,), per_channel=per_channel, pending=3)
    problem = Problem(case)
    q, tokens = problem.flat_q, problem.flat
    want, _ = reference.delta_ragged(q, tokens, problem.matrix, (), LAYER, problem.ragged)

    def rows_at(begin, width, pending, state):
        rows = state_rows((5 + begin,), (width,), (pending,), width)
        drafted = part(tokens, begin, begin + width)
        lead = jax.tree.map(lambda leaf: leaf[None], drafted)
        out, *state = run_rows(q[None, begin : begin + width], lead, *state, LAYER, rows, platform="cpu")
        np.testing.assert_allclose(out[0], want[begin : begin + width], rtol=0, atol=1e-5)
        return state

    state = rows_at(0, 4, 0, (problem.matrix, problem.pending))
    at = 1 + accepted
    state = rows_at(at, 1, accepted, state)
    state = rows_at(at + 1, 4, 0, state)
    at = at + 2 + accepted
    state = rows_at(at, 3, accepted, state)
    rows = state_rows((6 + at,), (9,), (0,), 0)
    out, _ = run_ragged(q[at + 1 : at + 10], part(tokens, at + 1, at + 10), *state, LAYER, rows, platform="cpu")
    np.testing.assert_allclose(out, want[at + 1 : at + 10], rtol=0, atol=1e-5)


def test_equal_keys_without_decay_do_not_blow_up():
    """One token repeated: the powers of the triangle pass 1e17, its inverse has no entry above two."""
    lower = np.tril(np.full((64, 64), 1.99, np.float32), -1)
    found = np.asarray(inverse(jnp.asarray(lower)))
    want = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-3 * np.abs(want).max())
    case = replace(CASES[0], decay=0.0)
    problem = Problem(case)
    keys = jnp.broadcast_to(problem.flat.keys[:1], problem.flat.keys.shape)
    problem.flat = problem.flat.replace(keys=keys, strengths=jnp.full_like(problem.flat.strengths, 0.99))
    problem.assert_ragged_is_right()


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_states_are_written_in_place(per_channel):
    problem = Problem(Case("large", (9, 3), (1, 70), (1, 2), 2, 2, 32, 32, per_channel, pending=3))
    draw = problem.draw
    matrix = jnp.zeros((LAYERS, 256, 2, 32, 32), jnp.float32)
    pending = DeltaTokens(*(jnp.zeros((LAYERS, 256, 3, *shape), jnp.float32) for shape in draw.shapes()))

    def ragged(matrix, pending, q, tokens, rows):
        out, matrix = delta_ragged(q, tokens, matrix, pending, LAYER, rows, "cpu")
        return matrix, out

    def equal(storage, q, tokens, rows):
        out, *storage = delta_rows(q, tokens, *storage, LAYER, rows, "cpu")
        return tuple(storage), out

    rows = state_rows((9, 3), (1, 4), (1, 2), 4)
    assert_in_place(equal, (matrix, pending), problem.rows_q, problem.rows, rows)
    assert_in_place(ragged, matrix, pending, problem.flat_q, problem.flat, problem.ragged)


def test_sizes_that_do_not_fit_are_named():
    problem = Problem(CASES[0])
    q, tokens, rows = problem.flat_q, problem.flat, problem.ragged
    with pytest.raises(ValueError, match="heads of keys"):
        delta_ragged(q[:, :1].repeat(3, 1), tokens, problem.matrix, (), LAYER, rows, "cpu")
    with pytest.raises(ValueError, match="values of"):
        delta_ragged(q, tokens.replace(values=tokens.values[..., 1:]), problem.matrix, (), LAYER, rows, "cpu")
    with pytest.raises(ValueError, match="draft fewer"):
        delta_rows(q[None, :3], jax.tree.map(lambda x: x[None, :3], tokens), problem.matrix, (), LAYER, rows, "cpu")
