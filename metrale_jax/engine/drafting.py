# SPDX-License-Identifier: Apache-2.0
"""`Drafting`: what an engine drafts in its steps, with room for it, and what the policy learns of them.

How far a sequence gets in a step that drafts is known when it is read, so such a step is read before the next is
planned. Steps without drafts run ahead as ever.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.engine.admission import Limits
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.request import Request
from metrale_jax.speculative.acceptance import Outcome, RowView
from metrale_jax.speculative.policy import DraftPolicy, DraftStats
from metrale_jax.steps.room import draft_room


@dataclass(frozen=True)
class DraftStep:
    """What the next step drafts: `width`, the most of a row, and how much of each request, by id."""

    width: int
    lens: Mapping[int, int]


NO_DRAFTS = DraftStep(0, {})


@dataclass(frozen=True)
class Timing:
    """A step that decodes: when it was launched, its width and padded rows, how many drafts each row was asked for, and
    how many programs had been compiled by then, -1 where its time says nothing."""

    began: float
    width: int
    num_rows: int
    num_compiles: int
    asked: tuple[int, ...] = ()


class Drafting:
    """Asks `policy` for the drafts of each step, and tells it what they came to."""

    def __init__(self, policy: DraftPolicy, limits: Limits, shapes: ShapePlan):
        self._policy, self._limits, self._shapes = policy, limits, shapes
        self._read_at = 0.0
        self._ran: set[tuple[int, int]] = set()

    def stats(self) -> DraftStats:
        """How drafting stands."""
        return self._policy.stats()

    def planned(self, running: Iterable[Request]) -> DraftStep:
        """What to draft of the requests that decode next; beams of a search are not drafted."""
        rows = [one for one in running if one.wants_more and one.search is None]
        if not rows:
            return NO_DRAFTS
        views = [RowView(one.request_id, self.room(one)) for one in rows]
        plan = self._policy.plan(views, self._shapes.row_bucket(len(rows)))
        if not plan.width:
            return NO_DRAFTS
        return DraftStep(plan.width, {one.request_id: count for one, count in zip(rows, plan.lens, strict=True)})

    def room(self, request: Request) -> int:
        """The most drafts that the request's limits allow."""
        limits = self._limits
        left = request.max_tokens - len(request.output) - request.in_flight
        recompute_len = limits.recompute_len if request.known_len <= limits.recompute_len else 0
        return draft_room(request.num_tokens + request.in_flight, left, recompute_len, limits.norm_tokens)

    def forget(self, request: Request) -> None:
        """Drops what is known of a request that has ended."""
        self._policy.forget(request.request_id)

    def read(
        self, timing: Timing | None, requests: Sequence[Request], counts: np.ndarray, drafts, now: float, compiles: int
    ) -> None:
        """Takes in a step that was read: the tokens that stand of each request, and its `drafts`, `()` for none.

        `timing` is None for a step with more in it than decoding; `compiles` programs have been compiled by now.
        """
        since, self._read_at = self._read_at, now
        if timing is None:
            return
        # The first run of a program is no measure: whatever is done once is done in it.
        shape = timing.width, timing.num_rows
        counts_for_time = shape in self._ran and compiles == timing.num_compiles
        self._ran.add(shape)
        seconds = now - max(timing.began, since) if counts_for_time else None
        outcomes = []
        if timing.width:
            rows = zip(requests, timing.asked, drafts.tolist(), counts.tolist(), strict=False)
            outcomes = [Outcome(one.request_id, asked, proposed, count - 1) for one, asked, proposed, count in rows]
        self._policy.record(timing.width, timing.num_rows, seconds, outcomes)
