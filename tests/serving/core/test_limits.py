# SPDX-License-Identifier: Apache-2.0
"""What a key may do is what its limits say, and a refusal tells the truth about when to come again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import Kind, ServiceError
from serving.core.keys import KeyLimits
from serving.core.limits import SWEEP_EVERY, Meter
from tests.serving.core.fake_clock import Clock


def refused(meter, num_tokens=0, key_id="a"):
    with pytest.raises(ServiceError) as told:
        meter.admit(key_id, num_tokens)
    assert told.value.kind is Kind.EXHAUSTED
    return told.value.retry_after_s


def meter_of(clock=None, **limits):
    return Meter(lambda key_id: KeyLimits(**limits), clock or Clock())


def test_a_minutes_requests_may_come_at_once_and_then_one_at_a_time():
    clock = Clock()
    meter = meter_of(clock, requests_per_minute=30)
    for _ in range(30):
        meter.admit("a", 5).close(5)
    assert refused(meter) == pytest.approx(2)
    clock.go(1.5)
    assert refused(meter) == pytest.approx(0.5)
    clock.go(0.5)
    meter.admit("a", 5)
    refused(meter)
    assert meter.num_refused == 3


def test_one_key_does_not_pay_for_another():
    meter = meter_of(requests_per_minute=1)
    meter.admit("a", 0)
    meter.admit("b", 0)
    refused(meter, key_id="a")


def test_what_was_generated_is_charged_when_the_call_ends_and_once():
    clock = Clock()
    meter = meter_of(clock, tokens_per_minute=60)
    permit = meter.admit("a", 10)
    other = meter.admit("a", 50)  # the bucket is empty now
    permit.close(30)
    permit.close(30)
    assert refused(meter, 1) == pytest.approx(31)
    other.close()
    clock.go(31)
    meter.admit("a", 1)


def test_a_prompt_larger_than_the_bucket_runs_when_that_is_full():
    clock = Clock()
    meter = meter_of(clock, tokens_per_minute=100)
    meter.admit("a", 40).close()
    assert refused(meter, 1000) == pytest.approx(24)
    clock.go(24)
    meter.admit("a", 1000).close()
    assert refused(meter, 1) == pytest.approx(901 * 0.6)


def test_what_is_refused_takes_nothing():
    meter = meter_of(requests_per_minute=2, tokens_per_minute=10)
    meter.admit("a", 8)
    for _ in range(5):
        refused(meter, 5)
    meter.admit("a", 2)


def test_open_calls_are_counted_until_they_close():
    clock = Clock()
    meter = meter_of(clock, max_concurrent=2)
    permits = [meter.admit("a", 5) for _ in range(2)]
    assert meter.num_open == 2 and refused(meter) > 0
    clock.go(50)
    permits[0].close(7)
    permits[0].close(7)
    assert meter.num_open == 1
    meter.admit("a", 5)
    assert refused(meter) > 1, "calls were seen to take long"


def test_without_limits_nothing_is_refused():
    meter = meter_of()
    for _ in range(1000):
        meter.admit("a", 1 << 20)
    assert meter.num_open == 1000


def test_limits_that_change_hold_from_then_on():
    limits, clock = {"a": KeyLimits()}, Clock()
    meter = Meter(limits.__getitem__, clock)
    meter.admit("a", 500).close(500)
    limits["a"] = KeyLimits(requests_per_minute=2, tokens_per_minute=600)
    meter.admit("a", 600)
    limits["a"] = KeyLimits(requests_per_minute=60)
    meter.admit("a", 1 << 20)
    limits["a"] = KeyLimits()
    meter.admit("a", 1 << 20)


def test_what_limits_of_raises_is_told():
    def gone(key_id):
        raise ServiceError(Kind.UNAUTHENTICATED, "gone")

    with pytest.raises(ServiceError, match="gone"):
        Meter(gone, Clock()).admit("a", 1)


def test_accounts_that_say_nothing_are_forgotten():
    clock = Clock()
    meter = meter_of(clock, requests_per_minute=60)
    held = meter.admit("held", 0)
    for number in range(10 * SWEEP_EVERY):
        meter.admit(str(number), 0).close()
        clock.go(0.01)
    assert len(meter._accounts) < 2 * SWEEP_EVERY and meter.num_open == 1
    held.close()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 200),
    st.integers(0, 5000),
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 8000), st.integers(0, 2000)), min_size=1, max_size=30),
)
def test_who_comes_again_as_told_is_let_in_and_never_sooner(per_minute, tokens, calls):
    clock = Clock(1e7)
    meter = meter_of(clock, requests_per_minute=per_minute, tokens_per_minute=tokens)
    began_s, num_let_in = clock.now_s, 0
    for pause_s, num_tokens, num_generated in calls:
        clock.go(pause_s)
        try:
            permit = meter.admit("a", num_tokens)
        except ServiceError as error:
            wait_s = error.retry_after_s
            assert wait_s > 0
            clock.go(wait_s * 0.99 - 1e-3)
            if wait_s > 1:
                refused(meter, num_tokens)
            clock.go(wait_s * 0.01 + 1e-3)
            # Both limits may bind, and the first to be found is told first.
            try:
                permit = meter.admit("a", num_tokens)
            except ServiceError as second:
                clock.go(second.retry_after_s)
                permit = meter.admit("a", num_tokens)
        num_let_in += 1
        permit.close(num_generated)
    if per_minute:
        assert num_let_in <= per_minute * (1 + (clock.now_s - began_s) / 60) + 1
