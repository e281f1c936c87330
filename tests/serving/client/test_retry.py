# SPDX-License-Identifier: Apache-2.0
"""When a call is made again, without a server."""

import pickle

import pytest

from serving.client import Clock, DeadlineError, InvalidRequestError, RetryPolicy, UnavailableError
from serving.client.errors import client_error
from serving.client.retry import Attempts

POLICY = RetryPolicy(max_attempts=4, first_wait_s=1, factor=2, max_wait_s=3, jitter=0.5)
GONE = client_error("UNAVAILABLE", "loading")


def attempts(chance=0.0, timeout_s=None, now=lambda: 0.0, policy=POLICY):
    return Attempts(policy, timeout_s, Clock(now_s=now, chance=lambda: chance))


def test_waits_grow_up_to_the_longest_and_end_with_the_tries():
    tries = attempts()
    assert [tries.wait_s(GONE) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UnavailableError):
        tries.wait_s(GONE)


def test_chance_shortens_waits_but_never_what_the_server_named():
    assert attempts(chance=1.0).wait_s(GONE) == 0.5
    busy = client_error("RESOURCE_EXHAUSTED", "busy", retry_after_s=2.0)
    assert attempts(chance=0.0).wait_s(busy) == 2
    assert attempts(chance=1.0).wait_s(busy) == 3


def test_a_time_beyond_the_longest_wait_is_not_waited_for():
    with pytest.raises(Exception, match="busy"):
        attempts().wait_s(client_error("RESOURCE_EXHAUSTED", "busy", retry_after_s=3.1))


@pytest.mark.parametrize(
    "code",
    ["INVALID_ARGUMENT", "UNAUTHENTICATED", "NOT_FOUND", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"],
)
def test_what_would_fail_again_is_not_tried_again(code):
    error = client_error(code, "no", retry_after_s=0.1)
    with pytest.raises(type(error)):
        attempts().wait_s(error)


def test_exhausted_without_a_time_does_not_pass():
    with pytest.raises(Exception, match="too large"):
        attempts().wait_s(client_error("RESOURCE_EXHAUSTED", "too large"))


def test_nothing_is_tried_again_after_a_part_was_delivered():
    with pytest.raises(UnavailableError):
        attempts().wait_s(GONE, delivered=True)


def test_no_wait_reaches_the_deadline():
    now = [0.0]
    tries = attempts(timeout_s=2.5, now=lambda: now[0])
    assert tries.left_s() == 2.5 and tries.wait_s(GONE) == 1
    now[0] = 1.0
    assert tries.left_s() == 1.5
    with pytest.raises(UnavailableError):
        tries.wait_s(GONE)


def test_an_infinite_timeout_is_none():
    assert attempts(timeout_s=float("inf")).left_s() is None


def test_a_thousand_failures_overflow_nothing():
    tries = attempts(policy=RetryPolicy(max_attempts=2000, first_wait_s=1, factor=10, max_wait_s=5))
    assert {tries.wait_s(GONE) for _ in range(1000)} == {1, 5}


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"jitter": 2}, {"factor": 0.5}, {"first_wait_s": 20}], ids=str)
def test_a_policy_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


def test_errors_cross_processes_whole():
    error = client_error("INVALID_ARGUMENT", "too hot", field="params.temperature", reason="RANGE", retry_after_s=None)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is InvalidRequestError and vars(copy) == vars(error) and str(copy) == str(error)
    assert type(client_error("DEADLINE_EXCEEDED", "late")) is DeadlineError
