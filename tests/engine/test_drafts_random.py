# SPDX-License-Identifier: Apache-2.0
"""Engines that draft under any order of events, over a device that guesses rightly and wrongly by chance."""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.engine.engine_world import BLOCK, Picky, World
from tests.engine.fake_device import Violation
from tests.engine.test_engine_random import (
    ANY_ORDER,
    DRAFT_CALLS,
    Machine,
    forget_beams_states,
    forget_copies,
    forget_limits,
    forget_states,
    job,
    keep_late_checkpoints,
    keep_stale_rows,
    keep_stale_slots,
    load,
    reasons_of,
    spoiled,
)


class DraftingMachine(Machine):
    """The same commands to an engine that drafts."""

    drafts = True

    @rule(name=st.sampled_from(DRAFT_CALLS), nth=st.integers(0, 4), takes_pool=st.booleans())
    def fail_drafts(self, name, nth, takes_pool):
        self.world.fail(name, nth, takes_pool)


TestAnyOrderOfDrafts = DraftingMachine.TestCase
TestAnyOrderOfDrafts.settings = settings(ANY_ORDER, max_examples=20)


def test_random_loads_that_draft_meet_every_event_and_give_solo_answers():
    worlds = [load(seed, 60, drafts=True) for seed in range(24)]
    requests = [one.request for world in worlds for one in world.sent]
    assert {request.finish_reason for request in requests} == {"stop", "length", "abort", "error"}
    accepted = sum(world.device.num_accepted for world in worlds)
    assert accepted > 500 and sum(world.device.num_proposed for world in worlds) > accepted + 500
    assert sum(world.device.num_past_ends for world in worlds) > 15, "some drafts after an answer's end stood"
    stats = [world.drafting.stats() for world in worlds]
    modes = {(world.drafting._policy.mode, world.device.recurrent) for world in worlds if world.device.num_accepted}
    assert len(modes) == 4
    assert {width for one in stats for width, count in one.steps if count} == {0, 1, 2, 3, 4, 5, 7, 8, 16}
    assert sum(one.num_switches for one in stats) > 10
    assert sum(request.num_preemptions > 0 for request in requests) > 5
    assert sum(world.device.num_limited for world in worlds) > 50
    assert sum(world.device.num_returns for world in worlds) > 3
    assert sum(world.device.num_copies for world in worlds) > 100
    assert sum(world.device.num_failed for world in worlds) > 5
    kept = [world.engine.memory.snapshots.stats for world in worlds if world.engine.memory.snapshots is not None]
    assert sum(one.hits for one in kept) > 15
    forms = [one for world in worlds for one in world.sent if one.job.constraint and world.device.num_accepted]
    assert {one.request.finish_reason for one in forms} >= {"stop", "length", "error"}
    assert any(request.search and request.hypotheses for request in requests)


@pytest.mark.slow
def test_a_million_steps_that_draft_give_solo_answers():
    seed = steps = 0
    while steps < 1_000_000:
        seed += 1
        steps += load(200_000 + seed, 200, drafts=True).steps


# What the tests above are to catch.


def draft_past_limits(engine):
    engine.drafting.room = lambda request: 16


def draft_before_all_is_read(engine):
    planned, settle = engine.draft_steps.planned, engine.settle

    def unread():
        engine.settle = lambda: None
        found = planned()
        engine.settle = settle
        return found

    engine.draft_steps.planned = unread


def forget_to_begin(engine):
    engine.device.begin = lambda slot, tokens: None


def take_rejected_drafts_for_accepted(engine):
    went_on = engine.draft_steps.went_on
    engine.draft_steps.went_on = lambda rows, counts: went_on(rows, counts + 1)


def stay_before_accepted_drafts(engine):
    went_on = engine.draft_steps.went_on
    engine.draft_steps.went_on = lambda rows, counts: went_on(rows, counts * 0 + 1)


def find_no_room(engine):
    engine.draft_steps.with_room = lambda decoding, drafts, copies: {
        request: drafts.lens.get(request.request_id, 0) for request in decoding if request.search is None
    }


def forget_what_ends(engine):
    engine.drafting.forget = lambda request: None


def grow_into_shared_blocks(engine):
    memory, grow = engine.memory, engine.memory.grow

    def shared(request, num_tokens):
        copies = grow(request, num_tokens)
        for copy in copies or ():
            memory.allocators[copy.group].share([copy.source])
            memory.allocators[copy.group].release([copy.target])
            table = request.lease.tables[copy.group]
            table[table.index(copy.target)] = copy.source
        return None if copies is None else []

    memory.grow = shared


FAULTS = (
    draft_past_limits,
    draft_before_all_is_read,
    forget_to_begin,
    take_rejected_drafts_for_accepted,
    stay_before_accepted_drafts,
    find_no_room,
    forget_what_ends,
    grow_into_shared_blocks,
    forget_copies,
    forget_states,
    forget_beams_states,
    forget_limits,
    keep_late_checkpoints,
    keep_stale_rows,
    keep_stale_slots,
)


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_an_engine_that_drafts_and_is_spoiled_is_caught(change):
    with pytest.raises((Violation, AssertionError)):
        spoiled(change, drafts=True)


def test_a_form_that_is_forked_where_it_began_is_caught(monkeypatch):
    monkeypatch.setattr(Picky, "fork", lambda self: Picky(self._kind, self._nth))
    with pytest.raises(Violation):
        spoiled(lambda engine: None, drafts=True)


# Failures between a step that drafts and the next.


def drafting_world(recurrent: bool = False, checkpoints: bool = False, limits: bool = False, skill: float = 1.0):
    """One group without a window, 60 blocks, four slots, a cache, and up to three drafts a row, `skill` of them right.

    Layers with state are limited after every 8 tokens with `limits`, and have snapshots taken as they decode with
    `checkpoints`.
    """
    state = (8, int(checkpoints), 1, 1, 1, 0, 1, 2 * limits) if recurrent else ()
    values = iter([0, 0, 60, 4, 60, 4, 1, 1, 0, int(recurrent), *state, 0, 0, 0, 1])
    world = World(lambda low, high: next(values, 0), drafts=True)
    assert world.shapes.draft_widths == (1, 3) and bool(world.device._norm_tokens) == (recurrent and limits)
    world.device.skills = (skill,)
    world.device._guesses = random.Random(1)
    return world


def decoding(world, *jobs):
    """Steps until all of `jobs` decode; their requests."""
    for one in jobs:
        world.submit(one)
    requests = [one.request for one in world.sent]
    while any(not request.output for request in requests):
        world.step()
        world.check()
    return requests


def fail_and_finish(world, name, takes_pool):
    world.fail(name, 0, takes_pool)
    world.finish()
    assert world.device.num_failed == 1 and world.drafting.stats().proposed


@pytest.mark.parametrize("takes_pool", [False, True])
def test_nothing_is_drafted_where_the_copies_for_all_drafts_failed(takes_pool):
    world = drafting_world()
    world.submit(job(2))
    world.fail("copy", 0, takes_pool)
    world.finish()
    world.submit(job(stem=1))
    world.finish()
    assert world.device.num_failed == 1 and world.drafting.stats().proposed
    assert reasons_of(world) == ["error", "error", "length"]


@pytest.mark.parametrize("takes_pool", [False, True])
@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_a_state_that_could_not_be_limited_after_drafts_ends_its_own_request(skill, takes_pool):
    world = drafting_world(recurrent=True, limits=True, skill=skill)
    decoding(world, job(length=9), job(stem=1, length=12))
    fail_and_finish(world, "limit_slots", takes_pool)
    assert sorted(reasons_of(world)) == ["error", "length"]


@pytest.mark.parametrize("takes_pool", [False, True])
def test_a_snapshot_that_could_not_be_kept_after_drafts_ends_nobody(takes_pool):
    world = drafting_world(recurrent=True, checkpoints=True)
    decoding(world, job(length=9), job(stem=1, length=11))
    fail_and_finish(world, "copy_slots", takes_pool)
    assert reasons_of(world) == ["length", "length"]


@pytest.mark.parametrize("name", ["advance_drafts", "judge", "fetch"])
def test_an_answer_goes_on_after_the_pool_is_lost_while_others_drafts_run(name):
    world = drafting_world(recurrent=True, checkpoints=True, limits=True)
    decoding(world, job(length=9))
    world.submit(job(stem=1, length=30))
    fail_and_finish(world, name, takes_pool=True)
    assert reasons_of(world)[1] == "length"


@pytest.mark.parametrize("takes_pool", [False, True])
def test_a_request_that_could_not_begin_ends_alone(takes_pool):
    world = drafting_world()
    decoding(world, job(length=9))
    world.submit(job(stem=1))
    fail_and_finish(world, "begin", takes_pool)
    assert reasons_of(world) == ["length", "error"]


@pytest.mark.parametrize("takes_pool", [False, True])
def test_the_form_of_a_request_waits_for_drafts_that_could_not_be_fetched(takes_pool):
    world = drafting_world()
    decoding(world, job(length=9, constraint=("plain", 0)))
    world.fail("fetch", 1, takes_pool)
    world.finish()
    assert world.device.num_failed == 1
    assert reasons_of(world) == [world.sent[0].reason if takes_pool else "error"]


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_what_is_kept_of_a_state_after_drafts_serves_the_next_turn(skill):
    world = drafting_world(recurrent=True, checkpoints=True, skill=skill)
    first = decoding(world, job(length=9, max_tokens=20))[0]
    while world.step():
        world.check()
    whole = first.num_tokens - 1
    world.submit(replace(job(max_tokens=5), prompt=tuple(first.tokens(0, first.num_tokens))))
    world.finish()
    second = world.sent[1].request
    assert second.cached_tokens == whole // BLOCK * BLOCK
    assert second.finish_reason == "length"
