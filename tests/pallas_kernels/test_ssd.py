# SPDX-License-Identifier: Apache-2.0
"""State space duality against its reference, and what must not change a result: chunks, neighbours, drafts, slots."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError
from pallas_kernels.ssd.cases import CASES, STATE_DTYPES, Case
from pallas_kernels.ssd.op import SsdStorage, ssd_ragged, ssd_rows
from pallas_kernels.state_rows import StateRows
from tests.pallas_kernels.ssd_problems import LAYER, Problem, close, heads_of, run_step, tokens_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_agrees_with_the_reference(case):
    Problem(case).assert_right()


@pytest.mark.parametrize("case", [case for case in CASES if case.row_width], ids=lambda case: case.name)
def test_the_interpreted_kernel_agrees_with_the_reference(case):
    Problem(case).assert_right("triton-interpreted")
    Problem(case, "bfloat16", "bfloat16").assert_right("triton-interpreted")


@pytest.mark.parametrize("case", CASES[4::3], ids=lambda case: case.name)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:])
def test_with_narrow_states_and_tokens_too(case, state_dtype):
    Problem(case, state_dtype, state_dtype).assert_right()


SIZES = st.sampled_from([(1, 1, 1, 1), (4, 2, 8, 5), (6, 1, 3, 16), (5, 5, 4, 7)])


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_equal_rows_agree_with_the_reference(data):
    width, room = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    room = max(room, width - 1)
    row = st.tuples(st.integers(0, 70), st.integers(0, width), st.integers(0, room))
    starts, lens, pending = zip(*data.draw(st.lists(row, min_size=1, max_size=5)), strict=True)
    pending = tuple(min(*pair) for pair in zip(pending, starts, strict=True))
    Problem(Case("any-rows", starts, lens, pending, width, room, *data.draw(SIZES))).assert_right()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_ragged_rows_agree_with_the_reference(data):
    room = data.draw(st.integers(0, 3))
    row = st.tuples(st.integers(0, 130), st.integers(0, 150), st.integers(0, room))
    starts, lens, pending = zip(*data.draw(st.lists(row, min_size=1, max_size=4)), strict=True)
    pending = tuple(min(*pair) for pair in zip(pending, starts, strict=True))
    case = Case("any-ragged", starts, lens, pending, 0, room, *data.draw(SIZES))
    Problem(case, num_padding=data.draw(st.integers(0 if sum(lens) else 1, 9))).assert_right()


class Sequence:
    """One sequence of random tokens in slot 2 of memory of NaN, taken in step by step."""

    def __init__(self, count: int, room: int = 0):
        rng = np.random.default_rng(0)
        case = CASES[0]
        self.heads, self.tokens = heads_of(rng, case.num_heads), tokens_of(rng, case, count)
        sizes = (case.num_heads, case.head_dim, case.state_dim)
        shapes = (sizes, sizes[:2], sizes[:1], (case.num_groups, case.state_dim))
        matrix, *pending = (
            jnp.full((2, 4, *[room] * (index > 0), *shape), jnp.nan) for index, shape in enumerate(shapes)
        )
        self.storage = SsdStorage(matrix, tuple(pending) if room else ())
        self.length, self.taken = 0, 0

    def rows(self, count: int, width: int):
        one = (2, self.length, count, 0, self.length - self.taken if self.taken else 0)
        return StateRows(*(jnp.asarray([value], jnp.int32) for value in one), width)

    def part(self, count: int):
        return jax.tree.map(lambda part: jnp.asarray(part[self.length : self.length + count]), self.tokens)

    def prefill(self, count: int):
        """Outputs of the next `count` tokens."""
        outputs, self.storage = run_step(False, "auto", self.part(count), self.heads, self.storage, self.rows(count, 0))
        self.length = self.taken = self.length + count
        return np.asarray(outputs)

    def verify(self, drafts, accepted: int = 0):
        """Outputs of the next token and those of the accepted `drafts` (others than the sequence's are wrong ones)."""
        part = self.part(1 + len(drafts))
        for offset, right in enumerate(drafts):
            if not right:
                part = jax.tree.map(lambda x, at=offset + 1: x.at[at].multiply(-3).at[at].add(1), part)
        width = 1 + len(drafts)
        outputs, self.storage = run_step(True, "auto", part, self.heads, self.storage, self.rows(width, width))
        self.taken = self.length + 1
        self.length += 1 + accepted
        return np.asarray(outputs)[: 1 + accepted]


@pytest.fixture(scope="module")
def whole():
    """Outputs of 200 tokens in one run, and the state after them."""
    sequence = Sequence(200)
    return sequence.prefill(200), np.asarray(sequence.storage.matrix[LAYER, 2])


@pytest.mark.parametrize(
    "cuts", [(64, 64, 64, 8), (1,) * 5 + (195,), (63, 1, 1, 135), (130, 70), (7, 100, 93)], ids=str
)
def test_any_split_of_a_prompt_gives_the_same(cuts, whole):
    sequence = Sequence(200)
    close(np.concatenate([sequence.prefill(count) for count in cuts]), whole[0], 1e-5)
    close(sequence.storage.matrix[LAYER, 2], whole[1], 1e-5)


def test_splits_where_chunks_end_change_no_bit(whole):
    sequence = Sequence(200)
    np.testing.assert_array_equal(np.concatenate([sequence.prefill(count) for count in (64, 128, 8)]), whole[0])
    np.testing.assert_array_equal(sequence.storage.matrix[LAYER, 2], whole[1])


@pytest.mark.parametrize("prompt", [1, 63, 70])
def test_a_state_goes_on_after_steps_of_decoding(prompt, whole):
    sequence = Sequence(200)
    found = [sequence.prefill(prompt), *(sequence.verify(()) for _ in range(9)), sequence.prefill(191 - prompt)]
    close(np.concatenate(found), whole[0], 1e-5)
    close(sequence.storage.matrix[LAYER, 2], whole[1], 1e-5)


@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("follow", ["verify", "decode", "prefill"])
def test_accepted_drafts_are_taken_in_by_whatever_step_follows(accepted, follow, whole):
    sequence = Sequence(200, room=3)
    found = [sequence.prefill(30)]
    drafts = [index < accepted for index in range(3)]
    for _ in range(4):
        found.append(sequence.verify(drafts, accepted))
        if follow == "decode":
            found.append(sequence.verify(()))
        elif follow == "prefill":
            found.append(sequence.prefill(5))
    found.append(sequence.prefill(200 - sequence.length))
    close(np.concatenate(found), whole[0], 1e-5)
    close(sequence.storage.matrix[LAYER, 2], whole[1], 1e-5)


def test_the_first_step_after_a_prompt_of_one_token_may_draft():
    sequence = Sequence(12, room=2)
    found = [sequence.prefill(1), *(sequence.verify((True, False), 1) for _ in range(5)), sequence.verify(())]
    close(np.concatenate(found), Sequence(12).prefill(12), 1e-5)


@pytest.mark.parametrize("uniform", [True, False])
def test_padding_and_other_layers_slots_stay_as_they_are(uniform):
    case = Case("idle", (5, 0, 9), (0, 0, 1), (0, 0, 0), 1 if uniform else 0)
    problem = Problem(case)
    before = problem.storage.replace(matrix=jnp.where(jnp.isnan(problem.storage.matrix), 7, problem.storage.matrix))
    problem.storage = before
    _, after = problem.run()
    touched = int(problem.rows.slots[2])
    same = np.ones(before.matrix.shape[:2], bool)
    same[LAYER, [0, touched]] = False
    np.testing.assert_array_equal(np.asarray(after.matrix)[same], np.asarray(before.matrix)[same])
    assert (np.asarray(after.matrix)[LAYER, touched] != np.asarray(before.matrix)[LAYER, touched]).any()


@pytest.mark.parametrize("name", ["verify-J3", "prefill-past-pending"])
def test_donated_storage_is_written_in_place(name):
    problem = Problem(next(case for case in CASES if case.name == name))
    entry = ssd_rows if problem.uniform else ssd_ragged

    def step(storage, tokens, rows, layer):
        return entry(tokens, problem.heads, storage, layer, rows, "cpu")

    def shape_of(part, num_slots):
        return jax.ShapeDtypeStruct((2, num_slots, *part.shape[2:]), part.dtype)

    temporaries = []
    for num_slots in (9, 900):
        shape = jax.tree.map(partial(shape_of, num_slots=num_slots), problem.storage)
        lowered = jax.jit(step, donate_argnums=0).lower(shape, problem.tokens, problem.rows, jnp.int32(LAYER))
        figures = lowered.compile().memory_analysis()
        assert figures.alias_size_in_bytes == sum(x.size * 4 for x in jax.tree.leaves(shape))
        temporaries.append(figures.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1], "memory follows the rows, not the slots"


def test_sizes_that_contradict_each_other_are_named():
    problem = Problem(CASES[0])
    with pytest.raises(ValueError, match=r"num_heads=4 is not a multiple of num_groups=3"):
        problem.tokens = problem.tokens.replace(b=jnp.zeros((1, 3, 8)), c=jnp.zeros((1, 3, 8)))
        problem.run()
    problem = Problem(CASES[0])
    problem.storage = problem.storage.replace(matrix=problem.storage.matrix[..., :5])
    with pytest.raises(ValueError, match=r"\(4, 16, 5\) are not the \(4, 16, 8\)"):
        problem.run()
    problem = Problem(replace(CASES[4], room=1, num_pending=(1, 0, 0, 1)))
    with pytest.raises(ValueError, match=r"4 tokens leave more pending than the 1"):
        problem.run()
    with pytest.raises(DispatchError, match="'fast' is not one of ssd's"):
        Problem(CASES[0]).run("fast")
