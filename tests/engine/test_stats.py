# SPDX-License-Identifier: Apache-2.0
"""What the engine says of itself, after loads of which the truth is known."""

import random

import pytest

from metrale_jax.engine.stats import RECENT_S, RecentRate
from metrale_jax.sampling.params import SamplingParams
from tests.engine.engine_world import BLOCK, Job, World, random_job

PROMPT = tuple(range(2, 12))  # two blocks and a half


def world_of(num_blocks=24, num_slots=6, prefill_tokens=24):
    """A world of one group of blocks, all that matters chosen."""
    chosen = iter((0, 0, num_blocks, num_slots, prefill_tokens, num_slots, 1, 1, 0))
    return World(lambda low, high: next(chosen, 0))


def job(prompt=PROMPT, max_tokens=6, seeds=(0,), watch=("none", 0), constraint=None, **params):
    wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=constraint is None, n=len(seeds), **params)
    return Job(tuple(prompt), wanted, seeds, watch, constraint)


def sent(world, *jobs):
    before = len(world.sent)
    assert all([world.submit(one) for one in jobs])
    return [one.request for one in world.sent[before:]]


def test_a_prompt_that_comes_again_is_cached_but_for_what_must_run():
    world = world_of()
    for _ in range(2):
        sent(world, job())
        while world.step():
            pass
    stats = world.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (20, 2 * BLOCK, 12)
    assert stats.hit_rate == 0.4
    assert dict(stats.finished) == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert stats.num_steps == 12, "a step for each token, of which the first runs the prompt as well"
    assert (stats.used_blocks, stats.cached_blocks + stats.free_blocks) == (0, 24)
    assert stats.cached_blocks == 15 // BLOCK, "the last token of an answer is never run"


def test_each_way_to_end_is_counted_by_its_name():
    world = world_of()
    requests = sent(
        world,
        job(max_tokens=2),
        job(watch=("ends", 3)),
        job(watch=("fails", 2)),
        job(max_tokens=20, deadline_s=5),
        job(max_tokens=20),
    )
    for _ in range(4):
        world.step()
    world.wait(6)
    world.engine.cancel(requests[-1])
    world.finish()
    stats = world.engine.stats()
    assert dict(stats.finished) == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert [len(request.output) for request in requests[:3]] == [2, 3, 2]
    assert stats.generated_tokens == sum(len(request.output) for request in requests), (
        "rows that were under way when their answer ended are no tokens of anybody"
    )


def test_requests_are_counted_where_they_are():
    world = world_of(num_slots=4, prefill_tokens=8)
    sent(world, job(seeds=(1, 2, 3)), job(prompt=PROMPT[::-1]))
    assert places(world) == (4, 0, 0)
    world.step()
    assert places(world) == (1, 3, 0), "three answers share one prompt of ten tokens, eight of which were run"
    world.step()
    assert places(world) == (0, 1, 3)
    world.finish()
    assert places(world) == (0, 0, 0)


def test_a_beam_search_is_one_request_and_generates_a_token_a_step():
    world = world_of()
    sent(world, Job(PROMPT, SamplingParams(beam_width=3, max_tokens=5, ignore_eos=True), (0,)))
    assert places(world) == (1, 0, 0)
    world.step()
    world.step()
    assert places(world) == (0, 0, 1)
    world.finish()
    stats = world.engine.stats()
    assert stats.generated_tokens == 5 and dict(stats.finished)["length"] == 1


def places(world):
    stats = world.engine.stats()
    return stats.num_waiting, stats.num_prefilling, stats.num_running


def test_what_is_run_again_is_counted_once():
    world = world_of(num_blocks=11)
    requests = sent(world, job(max_tokens=18), job(prompt=PROMPT[::-1], max_tokens=18))
    late = sent(world, job(prompt=PROMPT[2:], max_tokens=4))
    world.finish()
    stats = world.engine.stats()
    assert stats.num_preemptions == sum(request.num_preemptions for request in (*requests, *late)) > 0
    assert stats.prompt_tokens == 28
    assert stats.cached_tokens == sum(request.cached_tokens for request in (*requests, *late))


def test_a_pool_lost_before_the_first_token_counts_its_prompt_once():
    world = world_of(prefill_tokens=4)
    (kept,) = sent(world, job())
    world.step()
    world.engine.recover((), "", pool_lost=True)
    assert not kept.lease
    world.finish()
    stats = world.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, kept.cached_tokens) == (10, 0, 0)


class Slow:
    """A device whose calls take time."""

    def __init__(self, world, **seconds):
        self._world, self._device, self._seconds = world, world.device, seconds

    def __getattr__(self, name):
        call = getattr(self._device, name)
        if name not in self._seconds:
            return call

        def slow(*arguments):
            self._world.wait(self._seconds[name])
            return call(*arguments)

        return slow


@pytest.mark.parametrize("constraint", [None, ("plain", 0)], ids=["ahead", "waiting"])
def test_time_is_shared_out_among_the_phases_of_steps(constraint):
    world = world_of()
    world.engine.device = Slow(world, advance=2, fetch=5)
    sent(world, job(constraint=constraint))
    world.wait(100)
    world.finish()
    stats = world.engine.stats()
    assert stats.plan_s == 0 and stats.launch_s == 2 * stats.num_steps
    assert stats.read_s == 5 * stats.num_steps, "also where a step waits for the one before to be read"
    assert stats.busy_s == 7 * stats.num_steps
    assert stats.uptime_s == 100 + stats.busy_s
    assert stats.tokens_per_s == stats.generated_tokens / stats.busy_s


def test_the_present_rate_forgets_what_is_long_ago():
    world = world_of()
    sent(world, job(max_tokens=5))
    world.wait(4)
    world.finish()
    assert world.engine.stats().recent_tokens_per_s == 5 / 4, "since the start, as long as that is shorter"
    world.wait(RECENT_S)
    assert world.engine.stats().recent_tokens_per_s == 0
    assert world.engine.stats().generated_tokens == 5


def test_a_rate_is_events_over_the_seconds_that_they_took():
    rate = RecentRate(100.0)
    assert rate.per_s(100.0) == 0
    rate.add(3, 100.5)
    assert rate.per_s(101.0) == 3
    for second in range(101, 160):
        rate.add(7, second + 0.25)
        rate.add(7, second + 0.75)
    assert rate.per_s(160.0) == 14, "nine whole seconds, and none of the tenth"
    assert rate.per_s(159.75) == 14 * RECENT_S / (RECENT_S - 0.25)
    assert rate.per_s(168.5) == 14 / 9.5
    assert rate.per_s(169.5) == 0


@pytest.mark.parametrize("seed", range(40))
def test_after_any_load_the_counts_are_those_of_its_requests(seed):
    rng = random.Random(seed)
    world, ended = World(rng.randint), []

    def on_finish(request):
        ended.append(request)
        if request.request_id % 3 == 0:
            raise (ValueError, AttributeError, KeyError)[request.request_id % 9 // 3]("broken listener")

    world.engine.on_finish = on_finish
    for _ in range(rng.randint(10, 60)):
        befall(world, rng)
        stats = world.engine.stats()
        usable = world.engine.memory.num_usable
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == usable
        assert min(stats.used_blocks, stats.cached_blocks, stats.free_blocks) >= 0
        assert sum(places(world)) + sum(count for _, count in stats.finished) == len(world.sent)
    world.finish()
    requests, stats = [one.request for one in world.sent], world.engine.stats()
    assert sorted(one.request_id for one in ended) == sorted(one.request_id for one in requests), "each is told once"
    assert stats.num_unreported == sum(request.request_id % 3 == 0 for request in requests)
    for reason, count in stats.finished:
        assert count == sum(request.finish_reason == reason for request in requests)
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests)
    drawn = [len(request.output) for request in requests if request.search is None]
    assert stats.generated_tokens == sum(drawn) or (stats.generated_tokens > sum(drawn) and len(drawn) < len(requests))
    if all(one.job.params.n == 1 for one in world.sent):
        entered = [request for request in requests if request.entered]
        assert stats.prompt_tokens == sum(len(request.prompt) for request in entered)
        assert stats.cached_tokens == sum(request.cached_tokens for request in entered)


def befall(world, rng):
    """Something happens."""
    kind = rng.randint(0, 11)
    if kind < 4:
        world.submit(random_job(rng.randint, world.num_slots))
    elif kind == 4:
        world.cancel(rng.randint(0, 11))
    elif kind == 5:
        world.wait(rng.randint(1, 20))
    elif kind == 6 and rng.randint(0, 2) == 0:
        world.fail(rng.choice(("advance", "draw", "fetch", "copy")), rng.randint(1, 3), rng.random() < 0.5)
    else:
        world.step()
