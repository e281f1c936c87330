# SPDX-License-Identifier: Apache-2.0
"""`DraftPolicy`: how many tokens to draft for each row of the next step, from what drafts and steps came to.

A step's time depends on its rows and its width (the most drafts of a row), hardly on how many rows draft. So the
policy compares, for each width, `tokens expected of these rows / time of such a step`, plain decoding being width 0,
and keeps the width in use until another is clearly better. What has not been seen is tried, from an allowance of
plain steps that may be lost: it grows by a small share of each step, drafts pay into it what they gain and out of it
what they lose, and when it is empty nothing is drafted. Hence a useless drafter costs a bounded share of the time.

No clock and no chance: the same calls give the same plans. Plans may run ahead of what was recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from metrale_jax.core.errors import MetraleError
from metrale_jax.speculative.acceptance import Acceptance, Outcome, RowView
from metrale_jax.speculative.costs import ENOUGH, StepCosts
from metrale_jax.speculative.settings import PolicySettings

MODES = ("auto", "always")
DEFAULTS = PolicySettings()
# Acceptance that a trial of drafts hopes for.
HOPE = 0.8
# An uncertain time may turn out this share shorter, by its count.
UNCERTAIN = 0.2
# No step is held against drafts for more than this many plain ones: it was an accident.
MAX_RATIO = 8.0


@dataclass(frozen=True)
class DraftPlan:
    """What to draft: the step's width, and for each row at most so many, in the order of the rows."""

    width: int
    lens: tuple[int, ...]


@dataclass(frozen=True)
class DraftStats:
    """How drafting stands. Pairs are by width, plain decoding first.

    `width` is the one in use (0: not drafting, but for trials), as decided for `num_rows` from `tokens_per_s` (empty
    until a plain step was measured there) and `step_s` (widths measured there). `steps` counts what was recorded, and
    `positions` the (proposed, accepted) of each draft position. `allowance` is how many plain steps drafts may lose.
    """

    width: int
    num_rows: int
    tokens_per_s: tuple[tuple[int, float], ...]
    step_s: tuple[tuple[int, float], ...]
    steps: tuple[tuple[int, int], ...]
    positions: tuple[tuple[int, int], ...]
    num_switches: int
    num_trials: int
    allowance: float

    @property
    def drafting(self) -> bool:
        """Whether drafts are in use."""
        return self.width > 0

    @property
    def proposed(self) -> int:
        """Drafts proposed so far."""
        return sum(proposed for proposed, _ in self.positions)

    @property
    def accepted(self) -> int:
        """Drafts accepted so far."""
        return sum(accepted for _, accepted in self.positions)


class _Watch:
    """When something is to be tried next at a row count: drafts (`due`, `gap`), and a plain step (`plain_due`)."""

    __slots__ = ("due", "gap", "plain_due", "plain_tries")

    def __init__(self, gap: int):
        self.gap, self.due = gap, 0
        self.plain_due = self.plain_tries = 0


class DraftPolicy:
    """Decides the drafts of each step. `widths` are those that steps are compiled for, ascending, without 0.

    Mode "always" drafts as much as the largest width and the rows' rooms allow, whatever it costs.
    """

    def __init__(self, widths: tuple[int, ...], mode: str = "auto", settings: PolicySettings = DEFAULTS):
        if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
            raise MetraleError(f"widths={widths} are not ascending numbers of drafts from 1 on; use e.g. (1, 3, 7).")
        if mode not in MODES:
            raise MetraleError(f"mode={mode!r} is none of {MODES}; use one of them.")
        self.widths, self.mode, self.settings = tuple(widths), mode, settings
        self._acceptance = Acceptance(self.widths, settings)
        self._costs = StepCosts(settings.draft_cost)
        self._watches: dict[int, _Watch] = {}
        self._allowance = settings.loss_start
        self._step = self._num_switches = self._num_trials = self._num_rows = 0
        self._width, self._unrest = (widths[-1] if mode == "always" else 0), 0.0
        self._after_drafts = self._plain_again = False
        self._tokens: list[float] = []
        self._steps = dict.fromkeys((0, *self.widths), 0)

    def plan(self, rows: Sequence[RowView], num_rows: int) -> DraftPlan:
        """Drafts of the next step, whose rows are padded to `num_rows`. No row gets more than its room."""
        self._step += 1
        if self.mode == "always":
            return self._filled(self.widths[-1], [room for _, room in rows])
        rooms, drafts = self._acceptance.expect(rows, self._step)
        if not any(rooms) and all(room <= 0 for _, room in rows):
            return self._filled(0, rooms)  # of no rows, too
        self._num_rows, self._tokens = num_rows, [float(len(rows)), *(len(rows) + more for more in drafts)]
        watch = self._watches.get(num_rows)
        if watch is None:
            watch = self._watches[num_rows] = _Watch(self.settings.min_gap)
        if any(rooms):
            self._switch()
        if self._plain_is_due(watch):
            return self._filled(0, rooms)
        width = self._trial(watch)
        if width and not self._width:
            rooms = [room for _, room in rows]  # those that pause too: what they tell is free
        return self._filled(width or self._width, rooms)

    def record(self, width: int, num_rows: int, seconds: float | None, outcomes: Sequence[Outcome]) -> None:
        """Takes in a step that was read, as it was planned; a plain one too.

        `seconds` is None where the step's time says nothing: prompts ran beside it, or a compiler. `outcomes` holds one
        for each row, also for those that were asked for no draft; a plain step needs none. Requests that ended in the
        step are forgotten after this.
        """
        assert width in self._steps, f"a step of width {width} was not planned by a policy of {self.widths}"
        self._steps[width] += 1
        # A plain step right after a drafted one says nothing: engines launch plain steps ahead of what they read, and
        # that one had to wait for what was accepted.
        if seconds is not None and (width or not self._after_drafts):
            self._costs.record(num_rows, width, seconds)
        self._after_drafts = width > 0
        watch = self._watches.get(num_rows)
        gain = self.settings.loss_share
        if width and outcomes:
            lost = self._lost(width, num_rows, self._acceptance.record(width, outcomes, self._step) / len(outcomes))
            gain -= lost
            if watch is not None and width != self._width:
                self._space(watch, lost > 0)
        elif not width and watch is not None:
            seen = self._costs.count(num_rows, 0)
            watch.plain_due = max(watch.plain_due, self._step + min(seen**2, self.settings.plain_gap))
        self._allowance = min(self._allowance + gain, self.settings.loss_cap)

    def forget(self, request_id: int) -> None:
        """Drops what is known of a request that has ended."""
        self._acceptance.forget(request_id)

    def stats(self) -> DraftStats:
        """How drafting stands now."""
        everything, rows = (0, *self.widths), self._num_rows
        plain = self._costs.seconds(rows, 0)
        step_s = [(width, self._costs.seconds(rows, width)) for width in everything]
        rates = zip(everything, self._rates() if plain and self._tokens else (), strict=False)
        return DraftStats(
            width=self._width,
            num_rows=rows,
            tokens_per_s=tuple((width, rate / plain) for width, rate in rates),
            step_s=tuple((width, seconds) for width, seconds in step_s if seconds is not None),
            steps=tuple(self._steps.items()),
            positions=self._acceptance.positions,
            num_switches=self._num_switches,
            num_trials=self._num_trials,
            allowance=self._allowance,
        )

    def _lost(self, width: int, num_rows: int, accepted: float) -> float:
        """Plain steps that a step took longer than its tokens would have; more while that is uncertain."""
        doubt = 1 + UNCERTAIN / 2 / max(self._costs.count(num_rows, 0), 1)
        taken = self._costs.taken(num_rows, width) * self._handicap(num_rows)
        return min(taken * doubt, MAX_RATIO) - 1 - accepted

    def _handicap(self, num_rows: int) -> float:
        """How much longer a step with drafts counts for than it takes."""
        return 1 + self.settings.unevenness * (1 - 1 / num_rows)

    def _filled(self, width: int, rooms: list[int]) -> DraftPlan:
        """A plan of the narrowest width that holds what rows of these rooms draft at `width`."""
        lens = tuple([max(room, 0) if room < width else width for room in rooms])
        most = max(lens, default=0)
        return DraftPlan(next((one for one in self.widths if one >= most), 0) if most > 0 else 0, lens)

    def _rates(self) -> list[float]:
        """Tokens in the time of a plain step, by width from 0 on."""
        ratio, rows = self._costs.ratio, self._num_rows
        return [self._tokens[0]] + [
            tokens / ratio(rows, width) for tokens, width in zip(self._tokens[1:], self.widths, strict=True)
        ]

    def _switch(self) -> None:
        """Takes another width into use if it is clearly better, the more clearly the more were of late.

        Plain decoding also when all that may be lost is.
        """
        self._unrest *= 1 - 1 / self.settings.calm
        handicap = self._handicap(self._num_rows)
        measured = {
            width: tokens / (ratio * handicap if width else ratio)
            for tokens, width in zip(self._tokens, (0, *self.widths), strict=True)
            if (ratio := self._costs.measured(self._num_rows, width)) is not None
        }
        if self._allowance < 0:
            best = 0
        else:
            best = max(measured, key=measured.__getitem__)
            if measured[best] <= measured.get(self._width, 0) * (1 + self.settings.margin * (1 + self._unrest)):
                return
        if best != self._width:
            self._num_switches += 1
            self._unrest += 1
            self._width = best

    def _plain_is_due(self, watch: _Watch) -> bool:
        """Whether this step is to be plain, to see what that takes; asked less often while times say nothing."""
        if self._plain_again:
            self._plain_again = False
            return True
        if self._step < watch.plain_due:
            return False
        self._plain_again = self._width > 0  # the first of the two is not measured
        watch.plain_tries += 1
        watch.plain_due = self._step + min(watch.plain_tries**2, self.settings.plain_gap)
        return True

    def _trial(self, watch: _Watch) -> int:
        """The width to try in this step, in place of the one in use; 0 for none."""
        if self._step < watch.due:
            return 0
        width = self._wider_or_narrower() if self._width else self._hopeful()
        if width:
            watch.due = self._step + watch.gap
            self._num_trials += 1
        return width

    def _wider_or_narrower(self) -> int:
        """A width whose time is uncertain and that would be clearly better than the one in use with some luck."""
        best, target = 0, self._tokens[self.widths.index(self._width) + 1]
        target *= (1 + self.settings.margin) / self._costs.ratio(self._num_rows, self._width)
        for tokens, width in zip(self._tokens[1:], self.widths, strict=True):
            count = self._costs.count(self._num_rows, width)
            if width != self._width and count < ENOUGH:
                rate = tokens / self._costs.ratio(self._num_rows, width) / (1 - UNCERTAIN / max(count, 1))
                if rate > target:
                    best, target = width, rate
        return best

    def _hopeful(self) -> int:
        """The least width that would pay if drafts were good, and that may be lost on now; the least of all first."""
        for width in self.widths:
            ratio = self._costs.ratio(self._num_rows, width)
            hoped = (1 - HOPE ** (width + 1)) / (1 - HOPE)
            seen_twice = self._costs.count(self._num_rows, width) > 1  # once may have been an accident
            if (not seen_twice or hoped > ratio * (1 + self.settings.margin)) and self._can_lose(ratio - 1):
                return width
        return 0

    def _can_lose(self, steps: float) -> bool:
        return self._allowance >= min(steps, self.settings.loss_cap)

    def _space(self, watch: _Watch, lost: bool) -> None:
        """Sets when to try again after a trial."""
        watch.gap = min(2 * watch.gap, self.settings.max_gap) if lost else self.settings.min_gap
        watch.due = self._step + (watch.gap if lost else 0)
