# SPDX-License-Identifier: Apache-2.0
"""What the next step does, as a function of what the scheduler sees."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.engine.scheduler import Budget, Chunk, StepPlan, View, Waiting, plan_step

BUDGET = Budget(prefill_tokens=64, prefill_rows=3)
EMPTY = View(waiting=(), running=(), free_rows=8, free_blocks=100, last_was_prefill=False)


def queue(*remaining, blocks=1, holds_row=False):
    return [Waiting(index, size, blocks, holds_row) for index, size in enumerate(remaining, start=1)]


def chunks(**view):
    return [(chunk.request_id, chunk.num_tokens) for chunk in plan_step(replace(EMPTY, **view), BUDGET).prefill]


def test_nothing_to_do_is_an_empty_plan():
    assert plan_step(EMPTY, BUDGET) == StepPlan()


def test_running_requests_are_decoded_where_none_wait():
    assert plan_step(replace(EMPTY, running=(3, 5)), BUDGET) == StepPlan(decode=(3, 5))


def test_prompts_share_the_budget_of_tokens_and_the_last_is_cut():
    assert chunks(waiting=queue(30, 30, 30)) == [(1, 30), (2, 30), (3, 4)]
    assert chunks(waiting=queue(200, 30)) == [(1, 64)]
    assert chunks(waiting=queue(64, 30)) == [(1, 64)]


def test_a_step_takes_no_more_prompts_than_it_has_rows():
    assert chunks(waiting=queue(1, 1, 1, 1)) == [(1, 1), (2, 1), (3, 1)]


def test_prompts_wait_for_a_free_row_unless_they_hold_one():
    assert chunks(waiting=queue(5, 5), free_rows=1) == [(1, 5)]
    assert chunks(waiting=queue(5, 5), free_rows=0) == []
    assert chunks(waiting=queue(5, 5, holds_row=True), free_rows=0) == [(1, 5), (2, 5)]


def test_prompts_wait_for_the_blocks_of_all_their_tokens():
    assert chunks(waiting=queue(5, 5, blocks=4), free_blocks=7) == [(1, 5)]
    assert chunks(waiting=queue(5, 5, blocks=4), free_blocks=8) == [(1, 5), (2, 5)]
    assert chunks(waiting=queue(5, blocks=4, holds_row=True), free_blocks=0) == [(1, 5)]


def test_each_running_answer_keeps_a_block_of_head_room():
    assert chunks(waiting=queue(5, blocks=4), free_blocks=5, running=(8, 9)) == []
    assert chunks(waiting=queue(5, blocks=4), free_blocks=6, running=(8, 9)) == [(1, 5)]


def test_a_prompt_that_must_wait_is_not_overtaken():
    waiting = [Waiting(1, 5, 50, False), Waiting(2, 5, 1, False)]
    assert chunks(waiting=waiting, free_blocks=20) == []


def test_prefill_and_decode_take_turns():
    both = replace(EMPTY, waiting=queue(500), running=(9,))
    assert plan_step(both, BUDGET) == StepPlan(prefill=(Chunk(1, 64),))
    assert plan_step(replace(both, last_was_prefill=True), BUDGET) == StepPlan(decode=(9,))
    alone = replace(both, running=(), last_was_prefill=True)
    assert plan_step(alone, BUDGET) == StepPlan(prefill=(Chunk(1, 64),)), "with nothing to decode there is no pause"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    waiting=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9), st.booleans()), max_size=6),
    running=st.integers(0, 5),
    free_rows=st.integers(0, 5),
    free_blocks=st.integers(0, 30),
    last_was_prefill=st.booleans(),
)
def test_no_plan_exceeds_what_is_there(waiting, running, free_rows, free_blocks, last_was_prefill):
    queued = [Waiting(index, *item) for index, item in enumerate(waiting)]
    view = View(queued, range(100, 100 + running), free_rows, free_blocks, last_was_prefill)
    plan = plan_step(view, BUDGET)
    assert not (plan.prefill and plan.decode)
    assert plan.decode in ((), tuple(view.running))
    assert len(plan.prefill) <= BUDGET.prefill_rows
    assert sum(chunk.num_tokens for chunk in plan.prefill) <= BUDGET.prefill_tokens
    assert [chunk.request_id for chunk in plan.prefill] == list(range(len(plan.prefill))), "in order of arrival"
    picked = [queued[chunk.request_id] for chunk in plan.prefill]
    entering = [item for item in picked if not item.holds_row]
    assert len(entering) <= free_rows
    assert not entering or sum(item.missing_blocks for item in entering) <= free_blocks - running
    cut = [chunk for chunk, item in zip(plan.prefill, picked, strict=True) if chunk.num_tokens < item.remaining]
    assert cut in ([], list(plan.prefill[-1:])), "only the last prompt is left half done"
