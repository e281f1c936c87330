# SPDX-License-Identifier: Apache-2.0
"""Where states of recurrent layers are kept, found again and given up, over a device that knows what each has seen."""

from dataclasses import replace

import pytest

from metrale_jax.engine.leaves import Node
from metrale_jax.engine.moves import spill_kept
from metrale_jax.engine.scheduler import Cuts
from metrale_jax.engine.snapshots import Snapshots
from metrale_jax.engine.spill import Spill
from metrale_jax.engine.tiers import Tier
from metrale_jax.sampling.params import SamplingParams
from tests.engine.engine_world import BLOCK, Job, World

SHARED = tuple(range(2, 13))  # two whole blocks and three tokens


def world_of(num_snapshots=8, decode_blocks=0, prefill_tokens=24, whole_prompts=False, **flags):
    """One group without a window, layers with recurrent state, and the policy asked for."""
    cuts = (flags.get(name, True) for name in ("chunk_ends", "last_block", "branches"))
    policy = decode_blocks, *cuts, 0, whole_prompts
    chosen = iter([0, 0, 60, 6, prefill_tokens, 6, 1, 1, 0, 1, num_snapshots, *policy])
    return World(lambda low, high: next(chosen, 0))


def run(world, *prompts, max_tokens=1):
    requests = []
    for prompt in prompts:
        job = Job(tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), (0,))
        assert world.submit(job)
        requests.append(world.sent[-1].request)
        while world.step():
            world.check()
    world.check()
    return requests


def test_an_equal_prompt_goes_on_from_its_last_whole_block():
    world = world_of(chunk_ends=False)
    first, second = run(world, SHARED, SHARED)
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * BLOCK)
    assert world.engine.stats().snapshot_hits == 1


def spans_of(world, request):
    return world.device.sequences[request.request_id].spans


@pytest.mark.parametrize("length", [1, 3, BLOCK, 2 * BLOCK + 3, 3 * BLOCK])
def test_of_a_prompt_that_was_run_whole_nothing_is_run_again(length):
    world = world_of(whole_prompts=True)
    first, second, third = run(world, *[(SHARED * 2)[:length]] * 3, max_tokens=6)
    assert [request.cached_tokens for request in (first, second, third)] == [0, length, length]
    assert spans_of(world, second)[0] == spans_of(world, third)[0] == (length, length + 1)
    assert first.output == second.output == third.output, "all of one seed"


def test_a_prompt_that_is_asked_again_while_the_first_still_runs_shares_no_block_that_it_writes_to():
    world = world_of(whole_prompts=True)
    job = Job(SHARED, SamplingParams(max_tokens=9, ignore_eos=True), (0,))
    world.submit(job)
    for _ in range(4):
        world.step()
    world.submit(replace(job, seeds=(1,)))
    world.finish()
    first, second = (one.request for one in world.sent)
    assert second.cached_tokens == len(SHARED) and first.output != second.output


@pytest.mark.parametrize(
    "params",
    [{"n": 3}, {"beam_width": 2, "n": 2}, {"logprobs": 2}, {"repetition_penalty": 1.5}, {"regex": "any"}],
    ids=lambda params: next(iter(params)),
)
def test_a_prompt_found_whole_is_answered_under_any_parameters(params):
    world = world_of(whole_prompts=True)
    run(world, SHARED)
    constraint = ("plain", 0) if "regex" in params else None
    sampling = SamplingParams(max_tokens=5, ignore_eos=constraint is None, **params)
    world.submit(Job(SHARED, sampling, (0,) * params.get("n", 1), constraint=constraint))
    world.finish()
    assert world.sent[-1].request.finish_reason in ("length", "stop")
    assert all(one.request.cached_tokens == len(SHARED) for one in world.sent[1:])


def test_what_parts_prompts_parts_their_ends():
    world = world_of(whole_prompts=True)
    run(world, SHARED)
    for params in ({"cache_salt": "other"}, {"prompt_logprobs": 1}):
        world.submit(Job(SHARED, SamplingParams(max_tokens=2, ignore_eos=True, **params), (0,)))
        while world.step():
            world.check()
        assert world.sent[-1].request.cached_tokens == 0
    [longer] = run(world, (*SHARED, 3))
    assert longer.cached_tokens == 2 * BLOCK, "a tail is no block"


@pytest.mark.parametrize("name", ["copy", "copy_slots", "draw", "fetch"])
@pytest.mark.parametrize("takes_pool", [False, True])
def test_a_prompt_found_whole_gives_back_what_it_held_where_its_step_fails(name, takes_pool):
    world = world_of(whole_prompts=True)
    run(world, SHARED)
    world.fail(name, 0, takes_pool)
    second, third = run(world, SHARED, SHARED)
    assert world.device.num_failed == 1
    assert second.finish_reason == ("length" if name == "fetch" and takes_pool else "error")
    lost = takes_pool or name == "fetch"
    assert third.cached_tokens == (len(SHARED) if not lost or second.finish_reason == "length" else 0)
    assert third.output == world.sent[0].answer


def test_an_interrupt_between_plan_and_moves_leaves_nothing_to_be_moved_later():
    world = world_of(whole_prompts=True)
    run(world, SHARED)
    world.submit(Job(SHARED, SamplingParams(max_tokens=3, ignore_eos=True), (0,)))
    world.submit(Job((*SHARED[:9], 5), SamplingParams(max_tokens=3, ignore_eos=True), (0,)))
    planned = world.engine.roster.planned_chunks

    def interrupted(num_decoding):
        world.engine.roster.planned_chunks = planned
        planned(num_decoding)
        world.device.num_failed += 1  # so that more work than said is none to wonder at
        raise KeyboardInterrupt

    world.engine.roster.planned_chunks = interrupted
    world.step()
    assert world.engine.roster.restores() == ([], [])
    world.finish()
    assert [one.request.finish_reason for one in world.sent] == ["length"] * 3


@pytest.mark.parametrize("name", ["copy", "copy_slots", "keep_rows"])
def test_an_end_that_was_never_written_is_not_kept(name):
    world = world_of(whole_prompts=True)
    world.fail(name, 0, takes_pool=False)
    first, second, third = run(world, SHARED, SHARED, SHARED)
    assert first.finish_reason == "error" and second.cached_tokens == 0 and third.cached_tokens == len(SHARED)


def test_a_prompt_that_is_planned_and_then_not_served_holds_nothing():
    world = world_of(whole_prompts=True)
    run(world, SHARED)
    memory = world.engine.memory
    world.submit(Job(SHARED, SamplingParams(max_tokens=2, ignore_eos=True), (0,)))
    request = world.sent[-1].request
    request.known_len = len(SHARED)
    memory.begin(request)
    [ending] = [node for node in memory.tree.kept() if len(node.key) < BLOCK]
    assert request.ending is ending and ending.pins == 1 and request.remaining == 0
    memory.end(request, keep=False)
    request.seq_len = 0
    assert not ending.pins and request.ending is None
    world.finish()
    assert request.cached_tokens == len(SHARED)


def test_an_end_goes_with_its_state_and_with_its_block():
    world = world_of(num_snapshots=1, whole_prompts=True, chunk_ends=False, last_block=False)
    run(world, SHARED, SHARED[:7])
    tails = [node.key for node in world.engine.memory.tree.kept() if len(node.key) < BLOCK]
    assert tails == [SHARED[4:7]], "the first one's state had to go, and a tail is no use without"
    world.engine.memory.tree.evict([60])
    world.check()
    assert world.engine.stats().used_snapshots == 0


def test_a_tail_taken_out_leaves_no_trace_among_the_leaves():
    world = world_of(num_snapshots=2, whole_prompts=True, chunk_ends=False, last_block=False)
    run(world, *((*SHARED[:5], token) for token in range(2, 13)), *((token, 2) for token in range(2, 13)))
    assert world.engine.stats().snapshots_evicted >= 20
    assert len([node for node in world.engine.memory.tree.kept() if len(node.key) < BLOCK]) == 2


def tiered(world, max_bytes=1 << 20):
    """The world with a lower tier, and the keys of what is read of it."""
    tier, read = Tier(max_bytes), []
    get = tier._get
    tier._get = lambda key: (read.append(key), get(key))[1]
    world.engine.memory.attach(Spill(tier, world.device, BLOCK, (0,), with_state=True))
    return read


def test_what_is_found_in_a_lower_tier_is_there_for_the_next():
    world = world_of(chunk_ends=False, branches=False)
    read = tiered(world)
    run(world, SHARED)
    spill_kept(world.engine)
    world.engine.memory.tree.clear()
    [second] = run(world, (*SHARED[:9], 2, 2, 2))
    assert second.cached_tokens == 2 * BLOCK and len(read) == 3, "two blocks and a state"
    [third] = run(world, (*SHARED[:9], 3, 3))
    assert third.cached_tokens == 2 * BLOCK and len(read) == 3, "they are in the pool again"


def test_a_state_that_is_promoted_takes_no_snapshot_from_under_who_enters_beside_it():
    world = world_of(num_snapshots=1, chunk_ends=False, branches=False)
    tiered(world)
    other = tuple(range(12, 1, -1))
    run(world, SHARED)
    spill_kept(world.engine)
    run(world, other)  # which has the only snapshot now
    for prompt in (other[:8] + (5,), SHARED[:8] + (5,)):
        world.submit(Job(prompt, SamplingParams(max_tokens=3, ignore_eos=True), (0,)))
    world.finish()
    assert [one.request.cached_tokens for one in world.sent] == [0, 0, 8, 8]


@pytest.mark.parametrize("name, nth", [("write_state", 0), ("copy_slots", 0)])
def test_a_promotion_that_fails_fails_its_request_alone(name, nth):
    world = world_of(chunk_ends=False, branches=False)
    tiered(world)
    run(world, SHARED)
    spill_kept(world.engine)
    world.engine.memory.tree.clear()
    world.fail(name, nth, takes_pool=False)
    second, third = run(world, SHARED, SHARED)
    assert second.finish_reason == "error" and third.cached_tokens == 2 * BLOCK
    assert third.output == world.sent[0].answer


def test_snapshots_at_chunk_ends_alone_land_in_the_unique_tails_and_serve_no_other_prompt():
    tails = ([2], [5, 5, 5, 5, 5, 5], [7, 7, 7, 7, 7, 7], [9, 9, 9, 9, 9, 9])
    alone = run(world_of(last_block=False, branches=False), *(SHARED[:8] + tuple(tail) * 2 for tail in tails))
    assert [request.cached_tokens for request in alone] == [0, 0, 0, 0]


def test_a_prompt_that_branches_off_leaves_a_state_for_the_third():
    tails = ([5] * 6, [7] * 6, [9] * 6)
    requests = run(world_of(chunk_ends=False), *(SHARED[:8] + tuple(tail) for tail in tails))
    assert [request.cached_tokens for request in requests] == [0, 0, 2 * BLOCK]


def test_the_next_turn_goes_on_from_what_decoding_left():
    world = world_of(decode_blocks=2, last_block=False, chunk_ends=False)
    [first] = run(world, SHARED, max_tokens=12)
    turn = (*SHARED, *first.output, 3, 3)
    [second] = run(world, turn)
    assert second.cached_tokens == 4 * BLOCK, "of 22 tokens run, the last multiple of two blocks is 16"


def test_a_cancelled_answer_keeps_its_checkpoint_and_a_failed_one_gives_it_back():
    for cancelled in (True, False):
        world = world_of(decode_blocks=2, last_block=False, chunk_ends=False)
        world.submit(Job(SHARED, SamplingParams(max_tokens=20, ignore_eos=True), (0,)))
        for _ in range(10):
            world.step()
        assert world.engine.stats().used_snapshots == 1
        if cancelled:
            world.cancel(0)
        else:
            world.fail("advance", 0, takes_pool=False)
        while world.step():
            world.check()
        world.check()
        assert world.engine.stats().used_snapshots == (1 if cancelled else 0)


def test_without_room_for_snapshots_nothing_is_found_and_nothing_said_to_be():
    requests = run(world_of(num_snapshots=0), SHARED, SHARED)
    assert [request.cached_tokens for request in requests] == [0, 0]


def test_a_failed_copy_of_a_snapshot_leaves_none_that_was_never_written():
    world = world_of()
    world.fail("copy_slots", 0, takes_pool=False)
    first, second, third = run(world, SHARED, SHARED, SHARED)
    assert first.finish_reason == "error" and second.cached_tokens == 0 and third.cached_tokens == 2 * BLOCK


def test_a_failed_restore_fails_its_request_and_the_next_finds_the_snapshot():
    world = world_of(chunk_ends=False)
    run(world, SHARED)
    world.fail("copy_slots", 0, takes_pool=False)
    second, third = run(world, SHARED, SHARED)
    assert second.finish_reason == "error" and third.cached_tokens == 2 * BLOCK
    assert third.output == world.sent[0].answer


def chain(length):
    """Nodes of one path, from the root."""
    nodes = [Node(None, "root", (), 0)]
    for index in range(length):
        nodes.append(Node(nodes[-1], (index,), (index + 1,), 0))
    return nodes


def test_who_saves_the_fewest_blocks_goes_first():
    nodes = chain(10)
    snapshots = Snapshots(5, 3)
    assert [snapshots.take(nodes[depth]) for depth in (4, 5, 10)] == [5, 6, 7]
    other = chain(3)
    assert snapshots.take(other[3]) == 6, "the one at depth 5 saves a block, the others 4 and 5"
    assert nodes[5].snapshot == 0 and other[3].snapshot == 6
    snapshots.check([*nodes[1:], *other[1:]])


def test_a_snapshot_that_is_used_outlasts_one_that_is_not():
    nodes, other = chain(4), chain(4)
    snapshots = Snapshots(1, 2)
    for path in (nodes, other):
        snapshots.take(path[4])
    third, fourth = chain(4), chain(4)
    assert snapshots.use(nodes[4]) == 1
    snapshots.take(third[4])
    assert nodes[4].snapshot or other[4].snapshot
    snapshots.use(third[4])
    snapshots.take(fourth[4])
    assert third[4].snapshot, "it was used after the clock had moved on"


def test_checkpoints_leave_half_of_the_units_to_prompts():
    snapshots = Snapshots(1, 4)
    held = [snapshots.checkpoint(8) for _ in range(4)]
    assert [one is not None for one in held] == [True, True, False, False]
    snapshots.clear()
    snapshots.keep(held[0], None)
    assert snapshots.stats.num_running == 0, "what is from before the pool was lost is of no account"
    snapshots.check([])


@pytest.mark.parametrize(
    "cuts, num_tokens, remaining, expected",
    [
        (Cuts(), 10, 30, 10),
        (Cuts(), 40, 30, 30),
        (Cuts((8, 20), 0, 4), 40, 30, 8),
        (Cuts((20,), 2, 4), 9, 30, 6),
        (Cuts((20,), 2, 4), 5, 30, 5),
        (Cuts((), 0, 16), 8, 30, 8),
        (Cuts((), 0, 16), 40, 40, 40),
    ],
)
def test_where_a_chunk_ends(cuts, num_tokens, remaining, expected):
    assert cuts.limited(num_tokens, remaining) == expected
