# SPDX-License-Identifier: Apache-2.0
"""A server goes forward only, and says where it stands."""

import itertools
import threading

import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import Lifecycle, State


@pytest.mark.parametrize("first, then", list(itertools.product(State, State)))
def test_it_moves_forward_only(first, then):
    lifecycle, heard = Lifecycle(), []
    lifecycle.move(first, "first")
    lifecycle.listen(lambda state, reason: heard.append((state, reason)))
    forward = list(State).index(then) > list(State).index(first)
    assert lifecycle.move(then, "then") is forward
    assert lifecycle.state is (then if forward else first)
    assert heard == ([(then, "then")] if forward else [])
    if forward:
        assert lifecycle.snapshot() == (then, "then") and lifecycle.reason == "then"


@pytest.mark.parametrize("state", list(State))
def test_calls_are_taken_while_it_serves_and_at_no_other_time(state):
    lifecycle = Lifecycle()
    lifecycle.move(state)
    if state is State.SERVING:
        lifecycle.refuse_unless_serving()
        return
    with pytest.raises(ServiceError) as told:
        lifecycle.refuse_unless_serving()
    assert told.value.kind is Kind.UNAVAILABLE and told.value.retry_after_s > 0


def test_of_many_threads_that_move_it_on_the_spot_one_does_and_all_listeners_hear_the_same_order():
    lifecycle, heard, again = Lifecycle(), [], []
    lifecycle.listen(lambda state, reason: heard.append(state))
    lifecycle.listen(lambda state, reason: again.append(state))
    moved, gate = [], threading.Barrier(6)

    def go():
        gate.wait()
        for state in (State.WARMING, State.SERVING, State.DRAINING, State.STOPPED):
            if lifecycle.move(state):
                moved.append(state)

    threads = [threading.Thread(target=go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == again == sorted(heard, key=list(State).index)
    assert sorted(moved, key=list(State).index) == heard and heard[-1] is State.STOPPED
