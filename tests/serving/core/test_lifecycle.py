# SPDX-License-Identifier: Apache-2.0
"""A server goes where it can get to from where it stands, and says where that is."""

import itertools
import threading

import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import END, NEXT, Lifecycle, State

WAYS = {
    State.LOADING: (),
    State.WARMING: (State.WARMING,),
    State.SERVING: (State.SERVING,),
    State.UNLOADED: (State.SERVING, State.UNLOADED),
    State.DRAINING: (State.DRAINING,),
    State.FAILED: (State.FAILED,),
    State.STOPPED: (State.STOPPED,),
}


def standing(state):
    lifecycle = Lifecycle()
    for step in WAYS[state]:
        assert lifecycle.move(step, "before")
    return lifecycle


@pytest.mark.parametrize("first, then", list(itertools.product(State, State)))
def test_it_moves_where_a_server_can_get_to(first, then):
    lifecycle, heard = standing(first), []
    before = lifecycle.snapshot()
    lifecycle.listen(lambda state, reason: heard.append((state, reason)))
    leads = then in NEXT[first]
    assert lifecycle.move(then, "then") is leads
    assert lifecycle.snapshot() == ((then, "then") if leads else before)
    assert heard == ([(then, "then")] if leads else [])


def test_models_come_and_go_but_an_end_is_an_end():
    models, end = list(State)[:4], list(State)[4:]
    assert tuple(end) == END
    for state in State:
        assert state not in NEXT[state]
        later = NEXT[state]
        if state in end:
            assert later == tuple(end[end.index(state) + 1 :])
        else:
            assert set(end) <= set(later) and standing(state).ends is False
    assert State.WARMING not in NEXT[State.SERVING], "what serves is warm"
    assert State.SERVING not in NEXT[State.UNLOADED], "what is not there has to be loaded"
    assert all(State.LOADING in NEXT[state] for state in models if state is not State.LOADING)


@pytest.mark.parametrize("state", list(State))
def test_calls_are_taken_while_it_serves_and_at_no_other_time(state):
    lifecycle = standing(state)
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
