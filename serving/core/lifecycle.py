# SPDX-License-Identifier: Apache-2.0
"""`Lifecycle`: where the server stands between its start and its end, and who is told when that changes."""

from collections.abc import Callable, Mapping
from enum import Enum
from threading import RLock
from types import MappingProxyType

from serving.core.errors import Kind, ServiceError


class State(Enum):
    """What the server is at. While models change it may go back and forth among the first four; the last three are its
    end, through which it goes in their order."""

    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    UNLOADED = "unloaded"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


END = (State.DRAINING, State.FAILED, State.STOPPED)
# What each may turn into. A model is warm only after it was loaded, and serves no call that is not loaded.
NEXT: Mapping[State, tuple[State, ...]] = MappingProxyType(
    {
        State.LOADING: (State.WARMING, State.SERVING, State.UNLOADED, *END),
        State.WARMING: (State.LOADING, State.SERVING, State.UNLOADED, *END),
        State.SERVING: (State.LOADING, State.UNLOADED, *END),
        State.UNLOADED: (State.LOADING, *END),
        State.DRAINING: END[1:],
        State.FAILED: END[2:],
        State.STOPPED: (),
    }
)
# What a caller is told, and the seconds after which asking again is worth it: a load takes seconds to minutes; who
# drains or has failed is replaced by another process, or is already.
REFUSALS = {
    State.LOADING: ("the server loads its model and answers nothing yet", 5.0),
    State.WARMING: ("the server warms up and answers nothing yet", 5.0),
    State.UNLOADED: ("the server has no model at present", 30.0),
    State.DRAINING: ("the server is shutting down and takes no new calls", 1.0),
    State.FAILED: ("the server's engine has failed", 10.0),
    State.STOPPED: ("the server has stopped", 1.0),
}

Listener = Callable[[State, str], None]


class Lifecycle:
    """Begins LOADING. Any thread may read it and move it on."""

    def __init__(self):
        self._now = (State.LOADING, "")
        self._moving = RLock()
        self._listeners: list[Listener] = []

    @property
    def state(self) -> State:
        """Where the server stands."""
        return self._now[0]

    @property
    def reason(self) -> str:
        """Why it came there, "" where nothing was given."""
        return self._now[1]

    @property
    def ends(self) -> bool:
        """Whether the server is at its end, from which nothing leads back."""
        return self.state in END

    def snapshot(self) -> tuple[State, str]:
        """State and reason of one moment."""
        return self._now

    def move(self, state: State, reason: str = "") -> bool:
        """Whether it moved: to a state that `NEXT` leads to, never on the spot. Returns after all listeners were
        told."""
        with self._moving:
            if state not in NEXT[self.state]:
                return False
            self._now = (state, reason)
            for listener in tuple(self._listeners):
                listener(state, reason)
            return True

    def listen(self, listener: Listener) -> None:
        """Nothing; `listener(state, reason)` hears of each later move, in order, in the thread that moves. It has to be
        quick, may wait for no other thread, and moves nothing itself."""
        with self._moving:
            self._listeners.append(listener)

    def refuse_unless_serving(self) -> None:
        """Nothing while SERVING. Raises `ServiceError` (UNAVAILABLE) otherwise."""
        state = self.state
        if state is not State.SERVING:
            about, retry_after_s = REFUSALS[state]
            raise ServiceError(
                Kind.UNAVAILABLE,
                f"{about}; come again in {retry_after_s:g} s or ask another server.",
                retry_after_s=retry_after_s,
            )
