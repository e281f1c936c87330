# SPDX-License-Identifier: Apache-2.0
"""The kernels of state space duality over ragged rows, interpreted on the CPU, against the reference, with NaN in all
memory that nobody owns; and what must change no bit of a sequence's answer."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.ssd.cases import CASES, Case
from pallas_kernels.ssd.op import RAGGED_IMPLEMENTATIONS
from tests.pallas_kernels.recurrent_problems import assert_no_races
from tests.pallas_kernels.ssd_problems import LAYER, Problem

IMPLS = ("triton-interpreted", "mosaic_tpu-interpreted")
IMPL = pytest.mark.parametrize("impl", IMPLS)
RAGGED = tuple(case for case in CASES if not case.row_width)
# Each compiles a program of many small operations: these cross each branch once, a slow sweep takes the rest.
QUICK = ("prefill-past-pending", "prefill-N5-K5-H7-Z3")


def is_right(impl: str, case: Case, *dtypes: str, **more) -> None:
    Problem(case, *dtypes, **more).assert_right(impl)
    if impl.startswith("mosaic_tpu"):
        assert_no_races()


@IMPL
@pytest.mark.parametrize(
    "case",
    [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in RAGGED],
    ids=lambda case: case.name,
)
def test_named_cases_agree_with_the_reference(case, impl):
    is_right(impl, case)


@IMPL
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids=str)
def test_narrow_states_and_tokens_and_padding_between_rows(dtypes, impl):
    case = Case("padding", (3, 0, 0, 60, 0), (1, 0, 0, 70, 20), (2, 0, 0, 1, 0), 0, 2, 3, 1, 40, 80)
    is_right(impl, case, *dtypes)


SIZES = st.sampled_from([(1, 1, 1, 1), (4, 2, 8, 5), (6, 1, 3, 16), (5, 5, 4, 7)])


def drawn(examples):
    def decorate(test):
        return settings(max_examples=examples, deadline=None, derandomize=True)(given(st.data())(test))

    return decorate


def agrees(impl, data):
    room = data.draw(st.integers(0, 3))
    row = st.tuples(st.integers(0, 130), st.integers(0, 150), st.integers(0, room))
    starts, lens, pending = zip(*data.draw(st.lists(row, min_size=1, max_size=4)), strict=True)
    pending = tuple(min(*pair) for pair in zip(pending, starts, strict=True))
    case = Case("drawn", starts, lens, pending, 0, room, *data.draw(SIZES))
    is_right(impl, case, num_padding=data.draw(st.integers(0 if sum(lens) else 1, 9)))


@IMPL
@drawn(2)
def test_any_ragged_rows_agree_with_the_reference(impl, data):
    agrees(impl, data)


@pytest.mark.slow
@IMPL
@drawn(40)
def test_many_ragged_rows_agree_with_the_reference(impl, data):
    agrees(impl, data)


@IMPL
def test_a_sequence_is_the_same_alone_beside_others_and_in_steps(impl):
    """Of tokens that another step would lay elsewhere and split where a chunk ends."""
    problem = Problem(Case("beside", (9, 64, 0), (30, 100, 3)))
    outputs, storage = problem.run(impl)
    before, slot = problem.storage, int(problem.rows.slots[1])

    def alone(first, count):
        problem.rows = jax.tree.map(lambda part: part[1:2], together).replace(
            starts=together.starts[1:2] + first,
            query_starts=together.starts[:1] * 0,
            query_lens=together.starts[:1] * 0 + count,
        )
        begin = 30 + first
        problem.tokens = jax.tree.map(lambda part: part[begin : begin + count], tokens)
        found, problem.storage = problem.run(impl)
        return found

    together, tokens = problem.rows, problem.tokens
    problem.storage = before
    parts = [alone(0, 64), alone(64, 36)]
    np.testing.assert_array_equal(np.concatenate(parts), outputs[30:130])
    np.testing.assert_array_equal(problem.storage.matrix[LAYER, slot], storage.matrix[LAYER, slot])


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_pending": 65}, "num_pending=65 are more than the 64"),
        ({"dtype": "float16"}, "dtype='float16' cannot be loaded"),
    ],
)
def test_a_tpu_declines_what_it_cannot_take_and_says_why(more, reason):
    facts = {"dtype": "bfloat16", "state_dtype": "float32", "state_dim": 128, "num_pending": 3, **more}
    with pytest.raises(DispatchError, match=reason):
        choose("ssd_ragged", RAGGED_IMPLEMENTATIONS, "tpu", "mosaic_tpu", **facts)
