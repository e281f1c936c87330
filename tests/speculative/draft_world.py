# SPDX-License-Identifier: Apache-2.0
"""A world without a model in which draft policies run: step times from a formula, acceptance from dice."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from metrale_jax.speculative.acceptance import Outcome, RowView
from metrale_jax.speculative.policy import DraftPolicy

WIDTHS = (1, 3, 7)


def bound_by_memory(num_rows: int, width: int) -> float:
    """Step seconds where weights are read once and arithmetic counts from about 100 rows on, as on an accelerator."""
    return 0.010 * max(1.0, num_rows * (width + 1) / 100) + 0.0002 * num_rows + 0.0005 * (width > 0)


def bound_by_arithmetic(num_rows: int, width: int) -> float:
    """Step seconds where each row verified costs as much as a decoded one, as on a CPU."""
    return 0.002 + 0.001 * num_rows * (width + 1)


@dataclass
class World:
    """Sequences that never end. `chance(step, request_id, position)` is that of a draft's acceptance, all before it
    accepted; `proposes(step, request_id)` says whether there are drafts at all. `lag` steps are planned before one is
    recorded, as an engine does that reads a step late."""

    chance: Callable[[int, int, int], float]
    cost: Callable[[int, int], float] = bound_by_memory
    proposes: Callable[[int, int], bool] = lambda step, request_id: True
    load: Callable[[int], int] = lambda step: 1
    room: Callable[[int, int], int] = lambda step, request_id: 99
    noise: float = 0.0
    seed: int = 0
    lag: int = 0
    timed: Callable[[int], bool] = lambda step: True
    seconds: float = 0.0
    tokens: int = 0
    plain_seconds: float = 0.0
    plans: list = field(default_factory=list)

    def run(self, policy: DraftPolicy, num_steps: int, first: int = 0) -> "World":
        """Runs steps `first` up to `first + num_steps`, adding up seconds, tokens, and what these tokens would have
        taken without drafts."""
        dice, unread = random.Random(self.seed + first), deque()
        for step in range(first, first + num_steps):
            size = self.load(step)
            rows = [RowView(one, self.room(step, one)) for one in range(size)]
            num_rows = 1 << (size - 1).bit_length()
            plan = policy.plan(rows, num_rows)
            outcomes = [self._drafted(dice, step, one, asked) for one, asked in enumerate(plan.lens)]
            seconds = self.cost(num_rows, plan.width) * (1 + self.noise * dice.uniform(-1, 1))
            unread.append((plan.width, num_rows, seconds if self.timed(step) else None, outcomes))
            drawn = size + sum(outcome.accepted for outcome in outcomes)
            self.seconds += self.cost(num_rows, plan.width)
            self.tokens += drawn
            self.plain_seconds += self.cost(num_rows, 0) * drawn / size
            self.plans.append((rows, plan))
            if len(unread) > self.lag:
                policy.record(*unread.popleft())
        return self

    def _drafted(self, dice: random.Random, step: int, one: int, asked: int) -> Outcome:
        proposed = asked if self.proposes(step, one) else 0
        accepted = 0
        while accepted < proposed and dice.random() < self.chance(step, one, accepted):
            accepted += 1
        return Outcome(one, asked, proposed, accepted)

    @property
    def speedup(self) -> float:
        """How much faster than plain decoding its tokens came."""
        return self.plain_seconds / self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
