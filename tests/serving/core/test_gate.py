# SPDX-License-Identifier: Apache-2.0
"""The queue is bounded, and who would only time out in it is turned away at once."""

import contextlib
import random

import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.gate import Gate
from tests.serving.core.fake_clock import Clock


def shed(gate, num_tokens=10, timeout_s=None):
    before = gate.num_shed
    with pytest.raises(ServiceError) as told:
        gate.enter(num_tokens, timeout_s)
    assert told.value.kind is Kind.EXHAUSTED and gate.num_shed == before + 1
    return told.value.retry_after_s


def worked(gate, clock, num_starts, each_s, num_tokens=10):
    """A queue that was worked off at a steady pace while it was never empty."""
    places = [gate.enter(num_tokens, None) for _ in range(num_starts)]
    for place in places:
        clock.go(each_s)
        place.started()


def test_a_full_queue_turns_away_until_a_place_is_given_up():
    gate = Gate(2, 0, Clock())
    first, second = gate.enter(10, None), gate.enter(10, None)
    assert gate.num_waiting == 2 and shed(gate) == 1
    first.started()
    third = gate.enter(10, None)
    shed(gate)
    second.left()
    gate.enter(10, None)
    third.left()
    assert gate.num_waiting == 1


def test_a_place_is_given_up_once():
    gate = Gate(0, 0, Clock())
    place, other = gate.enter(10, None), gate.enter(7, None)
    for give_up in (place.started, place.left, place.started, place.left):
        give_up()
    assert (gate.num_waiting, gate.num_waiting_tokens) == (1, 7)
    other.left()
    other.started()
    assert (gate.num_waiting, gate.num_waiting_tokens) == (0, 0)


def test_tokens_fill_it_too_and_one_long_prompt_may_wait_alone():
    gate = Gate(0, 100, Clock())
    long = gate.enter(500, None)
    shed(gate, 1)
    long.started()
    gate.enter(60, None)
    shed(gate, 41)
    gate.enter(40, None)


def test_a_call_that_would_time_out_in_the_queue_is_turned_away_at_once():
    clock = Clock()
    gate = Gate(0, 0, clock)
    worked(gate, clock, 50, 0.5)
    for _ in range(10):
        gate.enter(10, None)  # with the one to come some 5.5 s of work
    assert shed(gate, timeout_s=2) == pytest.approx(3.5, rel=0.05)
    gate.enter(10, 6).left()
    gate.enter(10, None).left()


def test_who_comes_again_as_told_is_let_in_if_the_pace_holds():
    clock = Clock()
    gate = Gate(8, 0, clock)
    worked(gate, clock, 8, 0.25)
    places = [gate.enter(10, None) for _ in range(8)]
    wait_s = shed(gate)
    assert wait_s == pytest.approx(0.25, rel=0.1)
    clock.go(wait_s)
    places[0].started()
    gate.enter(10, None)


def test_nothing_is_foretold_before_something_was_measured():
    clock = Clock()
    gate = Gate(0, 0, clock)
    for _ in range(3):
        gate.enter(10, None)
    clock.go(60)
    gate.enter(10, 0.001)


def test_an_empty_queue_lets_in_however_slow_it_was():
    clock = Clock()
    gate = Gate(0, 0, clock)
    worked(gate, clock, 10, 9.0)
    gate.enter(10, 0.5)
    shed(gate, timeout_s=0.5)


def test_an_idle_server_counts_for_no_pace_and_old_ones_are_forgotten():
    clock = Clock()
    gate = Gate(0, 0, clock)
    for _ in range(20):  # one at a time, each started at once, a minute apart
        place = gate.enter(10, None)
        clock.go(0.01)
        place.started()
        clock.go(1)
    for _ in range(5):
        gate.enter(10, None)
    gate.enter(10, 0.1)
    slow = Gate(0, 0, clock)
    worked(slow, clock, 10, 9.0)
    clock.go(600)
    slow.enter(10, None)
    slow.enter(10, 0.5)


def test_a_server_that_stands_still_is_seen_to():
    clock = Clock()
    gate = Gate(0, 0, clock)
    worked(gate, clock, 50, 0.1)
    gate.enter(10, None)
    gate.enter(10, 5).left()
    clock.go(120)
    assert shed(gate, timeout_s=5) > 100


def test_few_tokens_before_it_make_a_short_wait():
    clock = Clock()
    gate = Gate(0, 0, clock)
    worked(gate, clock, 40, 0.5, num_tokens=1000)
    for _ in range(20):
        gate.enter(10, None)  # 10 s by their number, 0.1 s by their length
    gate.enter(10, 1.0)


@pytest.mark.parametrize("starts_per_s, timeout_s", [(2.0, 3.0), (10.0, 1.0), (50.0, 0.5)])
def test_under_twice_the_load_who_is_let_in_starts_in_time_and_the_server_stays_busy(starts_per_s, timeout_s):
    clock, draw = Clock(), random.Random(7)
    gate = Gate(0, 0, clock)
    waiting, num_started, num_left = [], 0, 0
    next_start_s = clock.now_s
    ends_s = clock.now_s + 1000 / starts_per_s
    while clock.now_s < ends_s:
        clock.go(draw.expovariate(2 * starts_per_s))
        while waiting and max(next_start_s, waiting[0][0]) <= clock.now_s:
            arrived_s, place = waiting.pop(0)
            now_s, clock.now_s = clock.now_s, max(next_start_s, arrived_s)
            if clock.now_s > arrived_s + timeout_s:
                place.left()
                num_left += 1
            else:
                place.started()
                num_started += 1
                next_start_s = clock.now_s + draw.uniform(0.5, 1.5) / starts_per_s
            clock.now_s = now_s
        with contextlib.suppress(ServiceError):
            waiting.append((clock.now_s, gate.enter(draw.randint(1, 500), timeout_s)))
    assert num_started > 0.95 * 1000, "busy nearly all the time"
    assert num_left < 0.16 * num_started and gate.num_shed > 0.6 * num_started, (num_left, gate.num_shed)
