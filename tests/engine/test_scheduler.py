# SPDX-License-Identifier: Apache-2.0
"""Which prompts the next step takes further, as a function of what the scheduler sees."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.engine.scheduler import Budget, Chunk, Filling, View, Waiting, plan_chunks

BUDGET = Budget(prefill_tokens=64, prefill_rows=3)
PADDED = Budget(prefill_tokens=64, prefill_rows=3, sizes=(8, 16, 32, 64), step_tokens=4)
EMPTY = View(filling=(), waiting=(), num_decoding=0, free_slots=8, free_blocks=100)


def filling(*remaining):
    return [Filling(index, size) for index, size in enumerate(remaining, start=1)]


def queue(*remaining, blocks=1, slots=1):
    return [Waiting(index, size, blocks, slots) for index, size in enumerate(remaining, start=11)]


def chunks(budget=BUDGET, **view):
    return [(chunk.request_id, chunk.num_tokens) for chunk in plan_chunks(replace(EMPTY, **view), budget)]


def test_nothing_to_do_is_an_empty_plan():
    assert plan_chunks(EMPTY, BUDGET) == ()


def test_prompts_share_the_budget_of_tokens_and_the_last_is_cut():
    assert chunks(waiting=queue(30, 30, 30)) == [(11, 30), (12, 30), (13, 4)]
    assert chunks(waiting=queue(200, 30)) == [(11, 64)]
    assert chunks(waiting=queue(64, 30)) == [(11, 64)]


def test_prompts_under_way_go_first_and_only_others_enter():
    view = replace(EMPTY, filling=filling(10, 20), waiting=queue(50, 50))
    assert plan_chunks(view, BUDGET) == (Chunk(1, 10), Chunk(2, 20), Chunk(11, 34, enters=True))


def test_tokens_fill_a_size_where_padding_takes_longer_than_a_step():
    assert [PADDED.worth_running(count) for count in (1, 8, 16, 64)] == [1, 8, 16, 64]
    assert PADDED.worth_running(9) == 9, "8 + 8 tokens and a step are more than 16"
    assert PADDED.worth_running(17) == 16, "16 + 8 tokens and a step are fewer than 32"
    assert PADDED.worth_running(25) == 25
    assert PADDED.worth_running(40) == 32
    assert [replace(PADDED, step_tokens=8).worth_running(count) for count in (17, 40)] == [17, 32]
    assert replace(PADDED, sizes=()).worth_running(17) == 17


def test_padding_cuts_the_last_prompt_and_keeps_nobody_out():
    assert chunks(PADDED, waiting=queue(30, 10)) == [(11, 30), (12, 2)]
    assert chunks(PADDED, filling=filling(17)) == [(1, 16)]
    assert chunks(PADDED, waiting=queue(14, 3)) == [(11, 14), (12, 2)]
    assert chunks(PADDED, waiting=queue(16, 1)) == [(11, 16), (12, 1)]
    assert chunks(PADDED, waiting=queue(31, 8)) == [(11, 31), (12, 1)]
    assert chunks(PADDED, waiting=queue(32, 5)) == [(11, 32), (12, 5)]


def test_decoding_takes_nothing_from_the_budget_of_prompts():
    assert chunks(waiting=queue(200), num_decoding=50) == [(11, 64)]


def test_a_step_takes_no_more_prompts_than_it_has_rows():
    assert chunks(waiting=queue(1, 1, 1, 1)) == [(11, 1), (12, 1), (13, 1)]
    assert chunks(filling=filling(1, 1, 1), waiting=queue(1)) == [(1, 1), (2, 1), (3, 1)]


def test_prompts_wait_for_the_slots_of_all_their_answers():
    assert chunks(waiting=queue(5, 5), free_slots=1) == [(11, 5)]
    assert chunks(waiting=queue(5, 5), free_slots=0) == []
    assert chunks(waiting=queue(5, 5, slots=3), free_slots=5) == [(11, 5)]
    assert chunks(filling=filling(5, 5), free_slots=0) == [(1, 5), (2, 5)]


def test_prompts_wait_for_the_blocks_of_all_their_tokens():
    assert chunks(waiting=queue(5, 5, blocks=4), free_blocks=7) == [(11, 5)]
    assert chunks(waiting=queue(5, 5, blocks=4), free_blocks=8) == [(11, 5), (12, 5)]
    assert chunks(filling=filling(5), free_blocks=0) == [(1, 5)]


def test_each_running_answer_keeps_a_block_of_head_room():
    assert chunks(waiting=queue(5, blocks=4), free_blocks=5, num_decoding=2) == []
    assert chunks(waiting=queue(5, blocks=4), free_blocks=6, num_decoding=2) == [(11, 5)]


def test_a_prompt_that_must_wait_is_not_overtaken():
    assert chunks(waiting=[Waiting(1, 5, 50), Waiting(2, 5, 1)], free_blocks=20) == []


def test_nobody_is_looked_at_who_could_not_enter_anyway():
    def looked_at():
        raise AssertionError("the queue was read")
        yield

    assert chunks(filling=filling(100), waiting=looked_at()) == [(1, 64)]
    assert chunks(waiting=looked_at(), free_slots=0) == []


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([BUDGET, PADDED]),
    st.lists(st.integers(1, 150), max_size=5),
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 9), st.integers(1, 4)), max_size=6),
    st.integers(0, 12),
    st.integers(0, 9),
    st.integers(0, 30),
)
def test_a_plan_keeps_to_every_limit_and_to_the_order(
    budget, under_way, waiting, num_decoding, free_slots, free_blocks
):
    queued = [Waiting(index, *item) for index, item in enumerate(waiting, start=11)]
    view = View(filling(*under_way), queued, num_decoding, free_slots, free_blocks)
    plan = plan_chunks(view, budget)
    assert sum(chunk.num_tokens for chunk in plan) <= budget.prefill_tokens
    assert len(plan) <= budget.prefill_rows
    order = [*(item.request_id for item in view.filling), *(item.request_id for item in queued)]
    assert [chunk.request_id for chunk in plan] == [
        *order[: min(len(plan), len(under_way))],
        *order[len(under_way) : len(under_way) + max(0, len(plan) - len(under_way))],
    ]
    entered = [item for item in queued if item.request_id in {chunk.request_id for chunk in plan}]
    assert sum(item.slots for item in entered) <= free_slots
    assert not entered or sum(item.missing_blocks for item in entered) + num_decoding <= free_blocks
    assert all(chunk.num_tokens >= 1 for chunk in plan)
    if under_way:
        assert plan, "a prompt under way goes on in every step"
