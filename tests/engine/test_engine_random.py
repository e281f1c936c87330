# SPDX-License-Identifier: Apache-2.0
"""The host loop under any order of events, over a device whose memory proves who wrote it."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from metrale_jax.engine.snapshots import NOTHING_KEPT, KeptState
from metrale_jax.sampling.params import SamplingParams
from tests.engine.engine_world import BLOCK, LIMIT, STEMS, Job, World, random_forks, random_job
from tests.engine.fake_device import Violation

CALLS = (
    *("advance", "draw", "candidates", "score", "copy", "copy_slots", "keep_rows", "limit_slots", "read"),
    *("write_state", "fetch"),
)
DRAFT_CALLS = ("advance_drafts", "judge", "begin")


class Machine(RuleBasedStateMachine):
    """Commands to one engine; what it must keep is checked after each, and at the end all answers."""

    drafts = False

    @initialize(random=st.randoms(use_true_random=False))
    def start(self, random):
        self.world = World(random.randint, self.drafts)

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def submit(self, random, count):
        for _ in range(count):
            self.world.submit(random_job(random.randint, self.world.num_slots, self.world.earlier))

    @rule(count=st.integers(1, 9))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule(index=st.integers(0, 11))
    def cancel(self, index):
        self.world.cancel(index)

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds):
        self.world.wait(seconds)

    @rule(name=st.sampled_from(CALLS), nth=st.integers(0, 4), takes_pool=st.booleans())
    def fail(self, name, nth, takes_pool):
        self.world.fail(name, nth, takes_pool)

    @rule(rows=st.integers(1, 7))
    def break_rows(self, rows):
        self.world.break_rows(rows)

    @invariant()
    def sound(self):
        if "world" in vars(self):
            self.world.check()

    def teardown(self):
        if "world" in vars(self):
            self.world.finish()


ANY_ORDER = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = ANY_ORDER


def load(seed: int, num_commands: int, drafts: bool = False, forks: bool = False) -> World:
    """A world after a random load; every second one without failures, so that all answers must be whole. With `forks`
    most of what is sent are branches."""
    rng = random.Random(seed)
    world, calls = World(rng.randint, drafts), CALLS + DRAFT_CALLS if drafts else CALLS
    for _ in range(num_commands):
        command = rng.random()
        if forks and command < 0.35:
            world.submit_forks(*random_forks(rng.randint, world.num_slots, world.earlier))
        elif command < 0.45:
            world.submit(random_job(rng.randint, world.num_slots, world.earlier))
        elif command < 0.8:
            for _ in range(rng.randint(1, 7)):
                world.step()
        elif command < 0.87:
            world.cancel(rng.randint(0, 11))
        elif command < 0.94:
            world.wait(rng.randint(1, 10))
        elif seed % 2 and command < 0.96:
            world.break_rows(rng.randint(1, 7))
        elif seed % 2:
            world.fail(rng.choice(calls), rng.randint(0, 4), rng.random() < 0.5)
        world.check()
    world.finish()
    return world


def test_random_loads_meet_every_event_and_give_solo_answers():
    worlds = [load(seed, 60) for seed in range(60)]
    sent = [one for world in worlds for one in world.sent]
    requests = [one.request for one in sent]
    reasons = {request.finish_reason for request in requests}
    assert reasons == {"stop", "length", "abort", "error"}
    assert {one.reason for one in sent} == {"stop", "length", "error", ""}  # none is known of a search
    assert sum(world.steps for world in worlds) > 5000
    assert sum(request.num_preemptions > 0 for request in requests) > 20
    assert sum(request.cached_tokens for request in requests) > 1000
    assert sum(world.device.num_copies for world in worlds) > 50
    assert sum(world.device.num_failed for world in worlds) > 20
    kept = [world.engine.memory.snapshots.stats for world in worlds if world.engine.memory.snapshots is not None]
    assert sum(stats.hits for stats in kept) > 40 and sum(stats.evicted for stats in kept) > 200
    assert sum(world.device.num_limited for world in worlds) > 100
    assert sum(world.device.num_kept_rows_used for world in worlds) > 10
    assert sum(world.device.num_returns for world in worlds) > 15
    tiers = [world.tier.stats for world in worlds if world.tier is not None]
    assert sum(tier.spilled for tier in tiers) > 200 and sum(tier.hits for tier in tiers) > 4
    assert any(one.orphan and one.reason == one.request.finish_reason for one in sent)
    assert any(request.search and request.hypotheses for request in requests)
    broken = "watch is broken", "raised KeyError", "constraint is broken", "constraint is stuck"
    for told in ("not finite", "INJECTED", "allow no token", "deadline", *broken):
        assert any(told in str(request.error) for request in requests), told


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_random_loads_of_branches_give_solo_answers(drafts):
    worlds = [load(7000 + seed, 60, drafts, forks=True) for seed in range(20)]
    sent = [one for world in worlds for one in world.sent if one.branch]
    assert {one.request.finish_reason for one in sent} == {"stop", "length", "abort", "error"}
    # What a branch that follows skips without a cache, or past whole blocks, it has from the one that it follows.
    followers = [one for one in sent if one.leader is not None and one.request.entered]
    shared = [one for one in followers if one.request.cached_tokens]
    assert sum(world.device.num_copies for world in worlds) > 15
    assert sum(one.request.cached_tokens % BLOCK > 0 for one in shared) > 40
    assert sum(one.request.cached_tokens == len(one.job.prompt) for one in shared) > 4
    assert sum(one.request.num_preemptions > 0 for one in sent) > 2


@pytest.mark.slow
def test_millions_of_steps_give_solo_answers():
    seed = steps = 0
    while steps < 2_000_000:
        seed += 1
        steps += load(100_000 + seed, 200).steps


def spoiled(change, drafts: bool = False) -> None:
    """Loads without failures in which `change(engine)` spoiled the engine before the first."""
    for seed in range(0, 160, 2):
        rng = random.Random(seed)
        world = World(rng.randint, drafts)
        change(world.engine)
        for _ in range(40):
            world.submit(random_job(rng.randint, world.num_slots, world.earlier))
            for _ in range(rng.randint(0, 3)):
                world.step()
            world.check()
        world.finish()


def forget_copies(engine):
    engine.device.copy_blocks = lambda copies: None


def forget_states(engine):
    engine.device.copy_slots = lambda copies: None


def forget_beams_states(engine):
    advance = engine._advance_search

    def frozen(search, rows, candidates):
        copy, engine.device.copy_slots = engine.device.copy_slots, lambda copies: None
        advance(search, rows, candidates)
        engine.device.copy_slots = copy

    engine._advance_search = frozen


def count_keys_without_states(engine):
    engine.memory.tree.snapshots = None
    engine.memory._policy = replace(engine.memory._policy, whole_prompts=False)


def file_states_under_rounded_lengths(engine):
    memory = engine.memory
    if memory.snapshots is not None:

        def rounded(request):
            pin = request.lease.pin
            return KeptState(memory.snapshots.take(pin.node)) if pin.num_tokens else NOTHING_KEPT

        memory.at_chunk_end = rounded


def keep_late_checkpoints(engine):
    snapshots = engine.memory.snapshots
    if snapshots is not None:
        take = snapshots.checkpoint
        snapshots.checkpoint = lambda num_tokens: take(max(BLOCK, num_tokens - BLOCK))


def forget_limits(engine):
    engine.device.limit_slots = lambda slots: None


def cut_anywhere(engine):
    engine.roster._norm_tokens = 0


def limit_states_after_they_are_kept(engine):
    device, limit, copy = engine.device, engine.device.limit_slots, engine.device.copy_slots
    due = []
    device.limit_slots = due.extend

    def copied(copies):
        copy(copies)
        if due:
            limit(due)
            due.clear()

    device.copy_slots = copied


def forget_rows(engine):
    engine.device.keep_rows = lambda hidden, units: None


def keep_the_next_row(engine):
    keep = engine.device.keep_rows
    engine.device.keep_rows = lambda hidden, units: keep(hidden, np.roll(units, 1))


def write_to_kept_tails(engine):
    def shared(request):
        tail = request.ending is not None and request.num_tokens % BLOCK
        for group, block in enumerate(request.ending.blocks if tail else ()):
            engine.memory.allocators[group].share([block])
            engine.memory.allocators[group].release([request.lease.tables[group][-1]])
            request.lease.tables[group][-1] = block
        engine.slots.write(request.slot, request.lease)
        return []

    engine.memory.tail_copies = shared


def leave_tails_behind(engine):
    engine.memory.tail_copies = lambda request: []


def keep_tails_unwritten(engine):
    at_chunk_end = engine.memory.at_chunk_end
    engine.memory.at_chunk_end = lambda request: replace(at_chunk_end(request), copies=())


def run_the_last_token_twice(engine):
    if engine.memory.snapshots is not None:
        join = engine.roster.join

        def twice(request):
            request.seq_len -= bool(request.drawn_from)
            return join(request)

        engine.roster.join = twice


def share_all_namespaces(engine):
    begin = engine.memory.begin

    def shared(request):
        request.namespace = ()
        return begin(request)

    engine.memory.begin = shared


def keep_too_early(engine):
    keep = engine.memory.keep

    def early(request):
        written, request.seq_len = request.seq_len, min(request.num_tokens, request.lease.capacity or request.seq_len)
        keep(request)
        request.seq_len = written

    engine.memory.keep = early


def keep_stale_rows(engine):
    engine.draws.tables_changed = lambda: None


def keep_stale_slots(engine):
    engine.draws.slots_changed = lambda: None


def drop_a_block_early(engine):
    memory, begin = engine.memory, engine.memory.begin

    def narrow(request):
        missing = begin(request)
        request.lease.windows = tuple(max(1, window - 2) if window else 0 for window in memory._windows)
        return missing

    memory.begin = narrow


def never_outgrow(engine):
    engine._restart_outgrown = lambda: None


def run_again_at_will(engine):
    rows = engine._rows_with_room

    def again():
        for request in [one for one in engine.running.values() if one.search is None and one.seq_len == 13]:
            engine.settle()
            if not request.finished:
                engine.roster.requeue(request)
        return rows()

    engine._rows_with_room = again


def hold_blocks_twice(engine):
    engine.memory.tree.share = lambda node, depth, tables: False


def forget_history(engine):
    fresh = engine.draws._fresh

    def frozen(device, requests, size):
        drawn = fresh(device, requests, size)
        drawn.known = [10**6] * size
        return drawn

    engine.draws._fresh = frozen


FAULTS = (
    forget_copies,
    forget_states,
    forget_beams_states,
    count_keys_without_states,
    file_states_under_rounded_lengths,
    keep_late_checkpoints,
    forget_limits,
    cut_anywhere,
    limit_states_after_they_are_kept,
    forget_rows,
    keep_the_next_row,
    write_to_kept_tails,
    leave_tails_behind,
    keep_tails_unwritten,
    run_the_last_token_twice,
    share_all_namespaces,
    keep_too_early,
    keep_stale_rows,
    keep_stale_slots,
    drop_a_block_early,
    never_outgrow,
    run_again_at_will,
    hold_blocks_twice,
    forget_history,
)


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_spoiled_engine_is_caught(change):
    with pytest.raises((Violation, AssertionError)):
        spoiled(change)


def test_an_unspoiled_engine_is_not():
    spoiled(lambda engine: None)


def quiet_world(regime: int = 0, prefill_tokens: int = 60, num_blocks: int = 60, mixes: bool = True) -> World:
    """One group without a window, four slots, and a cache."""
    values = iter([0, regime, num_blocks, 4, prefill_tokens, 4, 1, mixes, 0])
    return World(lambda low, high: next(values, 0))


def job(num_answers: int = 1, length: int = 9, stem: int = 0, watch=("none", 0), constraint=None, **params) -> Job:
    plain = {"max_tokens": 12, "ignore_eos": constraint is None, "n": num_answers}
    sampling = SamplingParams(**{**plain, **params}, regex="any" if constraint else None)
    return Job(tuple(STEMS[stem][:length]), sampling, tuple(range(num_answers)), watch, constraint)


def reasons_of(world: World) -> list[str]:
    return [one.request.finish_reason for one in world.sent]


def test_a_state_that_makes_room_before_it_is_written_is_not_taken_for_what_it_was_to_be():
    load(1230, 60)  # a step keeps two states, and the second takes the unit of the first


def test_an_answer_cancelled_before_its_prompt_ran_takes_no_slot():
    world = quiet_world()
    world.submit(job(3))
    world.engine.cancel(world.sent[1].request)
    world.step()
    assert world.engine.slots.num_free == 2
    world.finish()
    assert reasons_of(world) == ["length", "abort", "length"]


def test_a_forked_answer_that_runs_again_reads_no_log_probabilities_of_others():
    world = quiet_world()
    world.submit(job(2, prompt_logprobs=1))
    for _ in range(5):
        world.step()
    world.engine.settle()
    world.engine.roster.requeue(world.sent[1].request)
    world.submit(job(stem=1, prompt_logprobs=1))
    world.finish()
    assert [len(one.request.prompt_logprobs) for one in world.sent] == [8, 0, 8]


def test_an_interrupt_while_results_are_awaited_loses_no_token():
    world = quiet_world()
    world.submit(job(2))
    world.submit(job(stem=1, beam_width=2))
    for _ in range(4):
        world.step()
    for nth in range(3):
        world.fail("fetch", nth, takes_pool=True)
    world.finish()
    assert world.device.num_failed == 3
    assert reasons_of(world) == ["length"] * 3


def test_a_callback_that_raises_ends_its_own_request_alone():
    world = quiet_world()
    world.submit(job(watch=("fails", 3)))
    world.submit(job(stem=1))
    world.submit(job(stem=2, constraint=("stuck", 2)))
    world.submit(job(stem=1, length=12, constraint=("plain", 0)))
    world.finish()
    assert reasons_of(world)[:3] == ["error", "length", "error"]
    assert "raised KeyError(3) after 12 tokens" in str(world.sent[0].request.error)
    assert world.sent[3].request.error is None


def test_an_answer_cancelled_while_its_past_is_run_again_has_run_each_token_once_more():
    world = quiet_world(regime=2, prefill_tokens=6)
    world.submit(job(length=1, max_tokens=21))
    request = world.sent[0].request
    while request.known_len <= LIMIT:
        world.step()
    world.step()
    assert world.engine.filling == [request]
    world.engine.cancel(request)
    world.finish()
    assert reasons_of(world) == ["abort"]
    assert world.device.sequences[request.request_id].spans[-3:] == [(LIMIT - 1, LIMIT), (0, 6), (6, 12)]


def test_an_answer_cancelled_before_its_constraint_is_seen_to_be_stuck_has_no_error():
    world = quiet_world()
    world.submit(job(constraint=("stuck", 2)))
    request = world.sent[0].request
    while request.fault is None:
        world.step()
    world.engine.cancel(request)
    world.finish()
    assert (request.finish_reason, request.error) == ("abort", None)


def test_a_fault_in_a_step_that_was_lost_is_forgotten_when_it_runs_again():
    world = quiet_world()
    world.submit(job(constraint=("plain", 0)))
    request = world.sent[0].request
    while len(request.output) < 2:
        world.step()
    request.constraint.mask = {}.popitem
    world.step()
    assert "popitem" in str(request.fault)
    del request.constraint.mask
    world.fail("fetch", 0, takes_pool=True)
    world.finish()
    assert world.device.num_failed == 1
    assert (request.error, reasons_of(world)) == (None, ["length"])


def test_a_scored_prompt_that_is_cached_already_does_not_hold_its_blocks_twice():
    world = quiet_world(num_blocks=11)
    world.submit(job(length=33, max_tokens=1))
    while world.step():
        pass
    world.submit(job(length=33, max_tokens=7, prompt_logprobs=1))
    world.finish()
    assert reasons_of(world) == ["length", "length"]
    assert world.sent[1].request.num_preemptions == 0, "all blocks but one are its own"


def test_an_answer_that_outgrows_its_frequencies_as_the_pool_is_lost_runs_again_under_the_new_ones():
    world = quiet_world(regime=2, mixes=False)
    world.submit(job(length=11, max_tokens=20))
    growing = world.sent[0].request
    while growing.seq_len < LIMIT - 1:
        world.step()
    # A prompt with a constraint waits in the same step until the other's token is read, and then cannot draw.
    world.submit(job(stem=1, constraint=("plain", 0)))
    world.fail("draw", 1, takes_pool=True)
    world.step()
    assert (growing.num_tokens, growing.lease) == (LIMIT + 1, None)
    world.finish()
    assert reasons_of(world) == ["length", "error"]
