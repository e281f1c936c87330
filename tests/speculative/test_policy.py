# SPDX-License-Identifier: Apache-2.0
"""`DraftPolicy` in a world of dice: what it gains, what it may lose, and what it never does."""

import random
from itertools import pairwise

import pytest

from metrale_jax.core.errors import MetraleError
from metrale_jax.speculative.acceptance import Outcome, RowView
from metrale_jax.speculative.costs import StepCosts
from metrale_jax.speculative.policy import DraftPlan, DraftPolicy
from metrale_jax.speculative.settings import PolicySettings
from tests.speculative.draft_world import WIDTHS, World, bound_by_arithmetic, bound_by_memory

# Of plain decoding's rate, whatever the drafter.
FLOOR = 0.97


def same(chance):
    return lambda step, one, at: chance


def by_position(step, one, at):
    return (0.85, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1)[at]


def bursting(step, one):
    """Whether a sequence repeats a passage at a step: 40 of each 160."""
    return (step + 53 * one) // 40 % 4 == 0


def often_in_bursts(step, one, at):
    return 0.93 if bursting(step, one) else 0.1


def in_bursts_or_by_chance(step, one):
    return bursting(step, one) or (7 * step + one) % 5 == 0


def slow_verify(num_rows, width):
    return 0.01 * (3.0 if width else 1.0)


def slower_verify(num_rows, width):
    return 0.01 * (8.0 if width else 1.0)


def rising(step):
    return 1 + step // 20 % 64


class Fixed:
    """A policy of one width."""

    def __init__(self, width):
        self.width = width

    def plan(self, rows, num_rows):
        return DraftPlan(self.width, (self.width,) * len(rows))

    def record(self, *told):
        pass


COSTS = {"memory": bound_by_memory, "arithmetic": bound_by_arithmetic, "slow": slow_verify, "slower": slower_verify}
DRAFTERS = {
    "useless": {"chance": same(0.0)},
    "poor": {"chance": same(0.3)},
    "fair": {"chance": same(0.6)},
    "good": {"chance": same(0.9)},
    "silent": {"chance": same(0.9), "proposes": lambda step, one: False},
    "later": {"chance": lambda step, one, at: 0.9 if step > 150 else 0.0},
    "no-more": {"chance": lambda step, one, at: 0.9 if step < 150 else 0.0},
    "bursts": {"chance": often_in_bursts, "proposes": in_bursts_or_by_chance},
    "mixed": {"chance": lambda step, one, at: 0.9 if one % 2 else 0.1},
}
LOADS = {"S1": lambda step: 1, "S8": lambda step: 8, "S64": lambda step: 64, "S1-64": rising}


def keeps_the_floor(drafter, cost, load, seed, num_steps=300):
    world = World(cost=COSTS[cost], load=LOADS[load], noise=0.1, seed=seed, lag=seed % 2, **DRAFTERS[drafter])
    return world.run(DraftPolicy(WIDTHS), num_steps).speedup >= FLOOR


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_never_cost_more_than_a_small_share(drafter, cost):
    assert keeps_the_floor(drafter, cost, "S1", 0) and keeps_the_floor(drafter, cost, "S8", 1)


@pytest.mark.parametrize("cost", ["memory", "arithmetic"])
@pytest.mark.parametrize("drafter", ["useless", "poor", "good"])
def test_drafts_cost_little_however_many_run(drafter, cost):
    assert keeps_the_floor(drafter, cost, "S64", 0, 200) and keeps_the_floor(drafter, cost, "S1-64", 1)


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_never_cost_more_than_a_small_share_at_length(drafter, cost, load):
    for seed in range(2):
        for num_steps in (300, 1500):
            assert keeps_the_floor(drafter, cost, load, seed, num_steps)


@pytest.mark.parametrize(
    ("cost", "size", "chance"),
    [
        ("memory", 1, same(0.5)),
        ("memory", 1, same(0.7)),
        ("memory", 1, same(0.97)),
        ("memory", 1, by_position),
        ("memory", 8, same(0.7)),
        ("memory", 8, by_position),
        ("memory", 8, same(0.3)),
        ("memory", 64, same(0.5)),
        ("memory", 64, same(0.9)),
        ("arithmetic", 1, same(0.7)),
        ("arithmetic", 1, same(0.9)),
        ("slow", 8, same(0.95)),
    ],
)
def test_a_good_drafter_runs_near_the_best_fixed_width(cost, size, chance):
    for seed in range(2 if size < 64 else 1):
        kind = {"chance": chance, "cost": COSTS[cost], "load": lambda step: size, "seed": seed}
        best = max(World(**kind).run(Fixed(width), 400).rate for width in (0, *WIDTHS))
        policy = DraftPolicy(WIDTHS)
        World(**kind, noise=0.1).run(policy, 200)
        assert World(**kind, noise=0.1).run(policy, 400, 200).rate >= 0.9 * best


def test_bursts_of_an_n_gram_proposer_are_used():
    world = World(chance=often_in_bursts, proposes=in_bursts_or_by_chance, load=lambda step: 8)
    fixed = World(chance=often_in_bursts, proposes=in_bursts_or_by_chance, load=lambda step: 8)
    assert world.run(DraftPolicy(WIDTHS), 600).rate >= 0.9 * fixed.run(Fixed(7), 600).rate


def test_a_drafter_that_becomes_useful_is_found_and_one_that_no_longer_is_dropped():
    late = DraftPolicy(WIDTHS)
    world = World(chance=lambda step, one, at: 0.9 if step >= 400 else 0.0).run(late, 400)
    assert late.stats().width == 0
    world.run(late, 150, 400)
    assert late.stats().width == 7

    early = DraftPolicy(WIDTHS)
    world = World(chance=lambda step, one, at: 0.9 if step < 200 else 0.0, cost=bound_by_arithmetic).run(early, 200)
    assert early.stats().drafting
    world.run(early, 100, 200)
    assert not early.stats().drafting


def test_more_sequences_are_drafted_less_for():
    policy = DraftPolicy(WIDTHS)
    widths = []
    for round_, size in enumerate((1, 64, 1)):
        World(chance=same(0.6), load=lambda step, size=size: size).run(policy, 200, 200 * round_)
        widths.append(policy.stats().width)
    assert widths[0] >= 3 and widths[1] == 1 and widths[2] >= 3


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.1, 0.3, 0.9])
def test_noise_does_not_make_widths_flap(chance):
    policy = DraftPolicy(WIDTHS)
    World(chance=same(chance), load=lambda step: 8, noise=0.2, seed=3).run(policy, 800)
    assert policy.stats().num_switches <= 10


def test_trials_of_what_does_not_pay_are_spaced():
    # A step of drafts is cheap here, so that the allowance alone would let one be tried every few steps.
    policy = DraftPolicy(WIDTHS)
    World(chance=same(0.0), load=lambda step: 4).run(policy, 1500)
    assert 15 <= policy.stats().num_trials <= 80


def test_switches_stay_rare_where_widths_are_equally_good():
    # Bound by arithmetic, three widths are within 3 % for one sequence.
    policy = DraftPolicy(WIDTHS)
    World(chance=by_position, cost=bound_by_arithmetic, noise=0.2).run(policy, 1500)
    assert policy.stats().num_switches <= 45


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_no_row_is_asked_for_more_than_its_room(mode):
    dice = random.Random(1)
    world = World(
        chance=same(0.8), load=lambda step: dice.randint(1, 20), room=lambda step, one: dice.choice((-1, 0, 1, 2, 5, 9))
    )
    world.run(DraftPolicy(WIDTHS, mode), 500)
    for rows, plan in world.plans:
        assert len(plan.lens) == len(rows)
        assert all(0 <= length <= max(row.room, 0) for length, row in zip(plan.lens, rows, strict=True))
        assert plan.width == next(width for width in (0, *WIDTHS) if width >= max(plan.lens))
    assert {plan.width for _, plan in world.plans} == {0, *WIDTHS}


def test_rows_without_room_and_steps_without_rows_are_plain():
    for mode in ("auto", "always"):
        policy = DraftPolicy(WIDTHS, mode)
        assert policy.plan([], 1) == DraftPlan(0, ())
        assert policy.plan([RowView(4, 0), RowView(5, 0)], 2) == DraftPlan(0, (0, 0))


def test_always_drafts_what_rooms_allow():
    policy = DraftPolicy(WIDTHS, "always")
    assert policy.plan([RowView(1, 99), RowView(2, 2)], 2) == DraftPlan(7, (7, 2))
    policy.record(7, 2, 9.0, [Outcome(1, 7, 0, 0), Outcome(2, 2, 0, 0)])
    assert policy.plan([RowView(1, 2), RowView(2, 0)], 2) == DraftPlan(3, (2, 0))
    assert policy.stats().drafting


def test_a_sequence_that_misses_pauses_longer_and_longer_and_comes_back_when_it_hits():
    settings = PolicySettings(patience=3, max_pause=8)
    policy = DraftPolicy((3,), settings=settings)
    hopeless_until = 120
    world = World(chance=lambda step, one, at: 0.95 if one or step >= hopeless_until else 0.0, load=lambda step: 4)
    world.run(policy, 240)
    asked = [step for step, (_, plan) in enumerate(world.plans) if plan.lens[0] and step > 10]
    before = [step for step in asked if step < hopeless_until]
    gaps = [after - step for step, after in pairwise(before)]
    assert 2 in gaps and max(gaps) == settings.max_pause + 1 + world.lag
    assert gaps[-1] > 4
    assert len([step for step in asked if step >= hopeless_until + 20]) > 90


def test_the_same_calls_give_the_same_plans():
    def plans():
        world = World(chance=same(0.6), load=rising, noise=0.2, seed=5, lag=1)
        return world.run(DraftPolicy(WIDTHS), 300).plans

    assert plans() == plans()


def test_without_times_drafts_are_only_tried():
    policy = DraftPolicy(WIDTHS)
    World(chance=same(0.9), timed=lambda step: False).run(policy, 300)
    assert policy.stats().width == 0 and policy.stats().tokens_per_s == ()


def test_times_of_some_steps_are_enough():
    policy = DraftPolicy(WIDTHS)
    world = World(chance=same(0.9), timed=lambda step: step % 3 == 0).run(policy, 200)
    assert policy.stats().width == 7 and world.run(policy, 200, 200).speedup > 3


@pytest.mark.parametrize("compiled", [0, 1, 3, 7])
def test_a_compile_delays_drafts_and_is_not_taken_for_their_cost(compiled):
    ran = set()

    def cost(num_rows, width):
        first = width == compiled and width not in ran
        ran.add(width)
        return 20.0 if first else bound_by_memory(num_rows, width)

    policy = DraftPolicy(WIDTHS)
    World(chance=same(0.9), load=lambda step: 4, cost=cost).run(policy, 600)
    assert policy.stats().width == 7 and dict(policy.stats().step_s)[compiled] < 0.02


def test_costs_are_a_mean_without_accidents_that_follows_a_lasting_change():
    costs = StepCosts(0.1)
    for seconds in (5.0, 0.010, 0.011, 0.009, 0.9, 0.010):
        costs.record(8, 0, seconds)
    assert costs.seconds(8, 0) == pytest.approx(0.010, rel=0.05)
    for _ in range(3):
        costs.record(8, 0, 0.05)
    assert costs.seconds(8, 0) == pytest.approx(0.05)


def test_what_was_not_measured_is_guessed_from_the_nearest():
    costs = StepCosts(0.1)
    assert costs.measured(8, 3) is None and costs.ratio(8, 3) == pytest.approx(1.3)
    for num_rows, plain, wide in ((8, 0.010, 0.012), (64, 0.020, 0.050)):
        costs.record(num_rows, 0, plain)
        costs.record(num_rows, 3, wide)
    assert costs.measured(1, 3) == pytest.approx(1.2) and costs.measured(32, 3) == pytest.approx(2.5)
    assert costs.ratio(8, 7) == pytest.approx(1.6) and costs.ratio(8, 1) == pytest.approx(1.0)


def test_stats_add_up():
    policy = DraftPolicy(WIDTHS)
    world = World(chance=same(0.8), load=lambda step: 4).run(policy, 200)
    stats = policy.stats()
    assert sum(count for _, count in stats.steps) == 200
    assert stats.accepted == world.tokens - 4 * 200
    assert stats.proposed == sum(sum(plan.lens) for _, plan in world.plans)
    assert stats.positions[0][1] / stats.positions[0][0] == pytest.approx(0.8, abs=0.05)
    assert [width for width, _ in stats.tokens_per_s] == [0, *WIDTHS]
    assert dict(stats.step_s)[7] == pytest.approx(bound_by_memory(4, 7))
    assert dict(stats.tokens_per_s)[7] == pytest.approx(4 * 4.16 / bound_by_memory(4, 7), rel=0.25)


def test_a_forgotten_sequence_starts_anew():
    policy = DraftPolicy(WIDTHS)
    for step in range(40):
        World(chance=lambda now, one, at: 0.9 if one else 0.0, load=lambda now: 8).run(policy, 1, step)
    assert 0 in policy.plan([RowView(one, 9) for one in range(8)], 8).lens
    policy.forget(0)
    assert policy.plan([RowView(one, 9) for one in range(8)], 8).lens[0] > 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DraftPolicy(()), r"widths=\(\)"),
        (lambda: DraftPolicy((0, 1)), r"widths=\(0, 1\)"),
        (lambda: DraftPolicy((3, 1)), r"widths=\(3, 1\)"),
        (lambda: DraftPolicy((1,), "never"), "mode='never'"),
        (lambda: PolicySettings(margin=0.0), "margin=0.0"),
        (lambda: PolicySettings(patience=0), "patience=0"),
        (lambda: PolicySettings(max_gap=1), "max_gap=1"),
    ],
)
def test_wrong_settings_are_refused(make, text):
    with pytest.raises(MetraleError, match=text):
        make()


def until_all_ended(policy, chance, num_rows, num_tokens, seed):
    """Plain steps in which as many answers as rows end, that begin together; drafts of 1 and 3 take 1.4 and 1.9."""
    dice, left, taken = random.Random(seed), dict.fromkeys(range(num_rows), num_tokens), 0.0
    while left:
        plan = policy.plan([RowView(one, min(3, room - 1)) for one, room in left.items()], num_rows)
        seconds = {0: 1.0, 1: 1.4, 3: 1.9}[plan.width] * (1 + 0.05 * dice.gauss(0, 1))
        taken, outcomes = taken + seconds, []
        for one, asked in zip(tuple(left), plan.lens, strict=True):
            accepted = 0
            while accepted < asked and dice.random() < chance:
                accepted += 1
            outcomes.append(Outcome(one, asked, asked, accepted))
            left[one] -= 1 + accepted
        policy.record(plan.width, num_rows, seconds, outcomes)
        for one in [one for one, room in left.items() if room <= 0]:
            policy.forget(one)
            del left[one]
    return taken


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.3, 0.4, 0.5])
def test_a_batch_that_ends_with_its_slowest_answer_loses_little(chance):
    runs = [96 / until_all_ended(DraftPolicy((1, 3)), chance, 8, 96, seed) for seed in range(24)]
    assert sum(runs) / len(runs) >= FLOOR - 0.01, runs
    assert 96 / until_all_ended(DraftPolicy((1, 3)), 0.9, 8, 96, 0) > 1.3, "what pays is still used"


def test_a_plain_step_that_had_to_wait_for_drafts_is_no_measure_of_plain_ones():
    policy, dice, taken, drawn, after = DraftPolicy((1,)), random.Random(0), 0.0, 0, False
    for _ in range(600):
        plan = policy.plan([RowView(0, 9)], 1)
        seconds = 1.4 if plan.width else 1.2 if after else 1.0
        accepted = int(plan.width > 0 and dice.random() < 0.37)
        policy.record(plan.width, 1, seconds, [Outcome(0, plan.lens[0], plan.lens[0], accepted)])
        taken, drawn, after = taken + seconds, drawn + 1 + accepted, plan.width > 0
    assert drawn / taken >= FLOOR, policy.stats()
    assert policy.stats().step_s[0] == (0, 1.0)
