# SPDX-License-Identifier: Apache-2.0
"""The TPU's kernels of state space duality, interpreted on the CPU, against the reference, with NaN in all memory that
nobody owns. The interpreter lets copies arrive as late as they may and notes races between them and loads."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import DispatchError, choose
from pallas_kernels.ssd.cases import CASES, Case
from pallas_kernels.ssd.mosaic_tpu import PIECE_BYTES, sizes_of
from pallas_kernels.ssd.op import IMPLEMENTATIONS
from tests.pallas_kernels.recurrent_problems import assert_no_races
from tests.pallas_kernels.ssd_problems import Problem

IMPL = "mosaic_tpu-interpreted"
ROWS = tuple(case for case in CASES if case.row_width)
# Each compiles a program of a thousand small operations: these cross each branch once, a slow sweep takes the rest.
QUICK = ("decode-N6-K1-H12-Z20", "decode-pending", "verify-J2-room-5")
FACTS = {"dtype": "bfloat16", "state_dtype": "float32"}


def is_right(case: Case, *dtypes: str) -> None:
    Problem(case, *dtypes).assert_right(IMPL)
    assert_no_races()


def quick(case: Case):
    return case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [quick(case) for case in ROWS], ids=lambda case: case.name)
def test_named_cases_agree_with_the_reference(case):
    is_right(case)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids=str)
def test_narrow_states_and_tokens_and_padding_between_rows(dtypes):
    case = Case("padding", (3, 0, 0, 9, 0), (1, 0, 0, 2, 2), (2, 0, 0, 1, 0), 2, 3, 3, 1, 16, 128)
    is_right(case, *dtypes)


def test_a_state_in_several_pieces_of_more_heads_than_lanes(monkeypatch):
    monkeypatch.setattr("pallas_kernels.ssd.mosaic_tpu.PIECE_BYTES", 48 * 8 * 128 * 4)
    case = Case("pieces", (3, 9), (1, 1), row_width=1, num_heads=144, num_groups=4, head_dim=8, state_dim=5)
    problem = Problem(case)
    assert sizes_of(problem.tokens, problem.storage, 1).num_pieces == 3
    problem.assert_right(IMPL)
    assert_no_races()


def test_a_head_wider_than_lanes():
    is_right(Case("wide", (3, 0), (1, 2), (1, 0), 2, 1, 2, 1, 136, 8))


SIZES = st.sampled_from([(1, 1, 1, 1), (4, 2, 8, 5), (6, 1, 3, 16), (5, 5, 4, 7)])


def drawn(examples):
    def decorate(test):
        return settings(max_examples=examples, deadline=None, derandomize=True)(given(st.data())(test))

    return decorate


def agrees(data):
    width, room = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    room = max(room, width - 1)
    row = st.tuples(st.integers(0, 70), st.integers(0, width), st.integers(0, room))
    starts, lens, pending = zip(*data.draw(st.lists(row, min_size=1, max_size=4)), strict=True)
    pending = tuple(min(*pair) for pair in zip(pending, starts, strict=True))
    is_right(Case("drawn", starts, lens, pending, width, room, *data.draw(SIZES)))


@drawn(2)
def test_any_equal_rows_agree_with_the_reference(data):
    agrees(data)


@pytest.mark.slow
@drawn(40)
def test_many_equal_rows_agree_with_the_reference(data):
    agrees(data)


def test_a_sequence_is_the_same_alone_and_beside_others():
    problem = Problem(Case("beside", (9, 0, 70), (2, 1, 2), (1, 0, 2), row_width=2, room=2))
    outputs, storage = problem.run(IMPL)
    problem.rows = jax.tree.map(lambda part: part[2:], problem.rows)
    problem.tokens = jax.tree.map(lambda part: part[4:], problem.tokens)
    alone, stored = problem.run(IMPL)
    np.testing.assert_array_equal(alone, outputs[4:])
    slot = int(problem.rows.slots[0])
    for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(storage), strict=True):
        np.testing.assert_array_equal(one[:, slot], other[:, slot])


def test_pieces_are_whole_heads_of_no_more_than_a_piece_s_bytes():
    problem = Problem(replace(CASES[0], name="large", num_heads=80, num_groups=1, head_dim=64, state_dim=128))
    sizes = sizes_of(problem.tokens, problem.storage, 1)
    assert (sizes.piece, sizes.num_pieces) == (20, 4)
    assert sizes.piece * 64 * 128 * 4 <= PIECE_BYTES


@pytest.mark.parametrize("name", FACTS)
def test_float16_is_declined_with_what_is_served(name):
    with pytest.raises(DispatchError, match=f"{name}='float16' cannot be loaded by a TPU.*bfloat16 and float32"):
        choose("ssd", IMPLEMENTATIONS, "tpu", "mosaic_tpu", **{**FACTS, name: jnp.dtype("float16").name})
