# SPDX-License-Identifier: Apache-2.0
"""`StepCosts`: what steps of each row count and width take, as steps have shown."""

# A step that takes this many times the usual is an accident (a compile, a busy host), unless several say so in a row.
OFF = 2.0
ACCIDENTS = 3
# A first step of a shape that takes this many plain ones is an accident until a second one does.
ABSURD = 8.0
# The newest step weighs one part in so many.
MEMORY = 24
# Steps after which the time of a shape is taken for certain.
ENOUGH = 3


class Estimate:
    """A running mean of seconds that accidents do not move."""

    __slots__ = ("count", "mean", "strikes")

    def __init__(self, seconds: float):
        self.mean, self.count, self.strikes = seconds, 1, 0

    def add(self, seconds: float) -> None:
        """Takes a step's time in."""
        usual = self.mean / OFF < seconds < self.mean * OFF
        if usual:
            self.count += 1
            self.strikes = 0
            self.mean += (seconds - self.mean) / min(self.count, MEMORY)
        elif self.count == 1:
            # One of the two was an accident, which takes longer.
            self.mean = min(self.mean, seconds)
            self.count = 2
        elif self.strikes + 1 < ACCIDENTS:
            self.strikes += 1
        else:
            self.mean, self.count, self.strikes = seconds, 1, 0


class StepCosts:
    """Estimates by padded row count and width, and what they say of shapes that have not run."""

    def __init__(self, draft_cost: float):
        self.draft_cost = draft_cost
        self._by_width: dict[int, dict[int, Estimate]] = {0: {}}

    def record(self, num_rows: int, width: int, seconds: float) -> None:
        """Takes a step's time in; one of no seconds says nothing."""
        if seconds <= 0:
            return
        estimates = self._by_width.setdefault(width, {})
        if known := estimates.get(num_rows):
            known.add(seconds)
        else:
            estimates[num_rows] = Estimate(seconds)

    def seconds(self, num_rows: int, width: int) -> float | None:
        """The usual time of a step, or None where none was measured."""
        known = self._by_width.get(width, {}).get(num_rows)
        return known and known.mean

    def count(self, num_rows: int, width: int) -> int:
        """How many steps an estimate rests on; up to `ENOUGH` it is uncertain."""
        known = self._by_width.get(width, {}).get(num_rows)
        return known.count if known else 0

    def measured(self, num_rows: int, width: int) -> float | None:
        """Time of a step of `width` in plain steps: at this row count, or at the nearest where both were measured."""
        here = self._quotient(num_rows, width)
        if here is not None:
            return here
        known = [(other, self._quotient(other, width)) for other in self._by_width.get(width, ())]
        near = [
            (max(other, num_rows) / min(other, num_rows), other, ratio) for other, ratio in known if ratio is not None
        ]
        return min(near)[2] if near else None

    def ratio(self, num_rows: int, width: int) -> float:
        """`measured`, or a hopeful guess: the nearest measured width's, with `draft_cost` for each draft between."""
        known = self.measured(num_rows, width)
        if known is not None:
            return known
        others = [other for other in self._by_width if self.measured(num_rows, other) is not None]
        nearest = min(others, key=lambda other: (other == 0, abs(other - width)))
        return max(1.0, self.measured(num_rows, nearest) + self.draft_cost * (width - nearest))

    def taken(self, num_rows: int, width: int) -> float:
        """What steps of this shape took in plain steps, absurd or not; `ratio` where that was not measured."""
        plain, wide = self.seconds(num_rows, 0), self.seconds(num_rows, width)
        return self.ratio(num_rows, width) if plain is None or wide is None else wide / plain

    def _quotient(self, num_rows: int, width: int) -> float | None:
        """`measured` at this row count alone."""
        if not width:
            return 1.0
        plain, wide = self._by_width[0].get(num_rows), self._by_width.get(width, {}).get(num_rows)
        if plain is None or wide is None:
            return None
        ratio = wide.mean / plain.mean
        return ratio if wide.count > 1 or ratio < ABSURD else None
