# SPDX-License-Identifier: Apache-2.0
"""Where states of recurrent layers are kept, found again and given up, over a device that knows what each has seen."""

import pytest

from metrale_jax.engine.leaves import Node
from metrale_jax.engine.scheduler import Cuts
from metrale_jax.engine.snapshots import Snapshots
from metrale_jax.sampling.params import SamplingParams
from tests.engine.engine_world import BLOCK, Job, World

SHARED = tuple(range(2, 13))  # two whole blocks and three tokens


def world_of(num_snapshots=8, decode_blocks=0, chunk_ends=True, last_block=True, branches=True, prefill_tokens=24):
    """One group without a window, layers with recurrent state, and the policy asked for."""
    policy = decode_blocks, chunk_ends, last_block, branches, 0
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
