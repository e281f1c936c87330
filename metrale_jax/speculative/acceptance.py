# SPDX-License-Identifier: Apache-2.0
"""`Acceptance`: how many drafts of each sequence are likely to be accepted, and which sequences pause.

A draft at position i, those before it accepted, is taken to be accepted with probability `skill × shape[i]`: `skill`
is the sequence's own and follows it fast; `shape` says how much worse later positions are, is the engine's, and is
learned from all sequences, each weighed by its skill (else only the sequences that guess well would be seen there).
So a step tells a sequence all it can for the price of one number, and a new one starts at the engine's average.
"""

from collections.abc import Sequence
from typing import NamedTuple

from metrale_jax.speculative.settings import PolicySettings

# Skills and shares are rounded to these many levels, so that few different expectations are computed.
SKILL_LEVELS, PROPOSES_LEVELS = 40, 10
# What the engine knows of positions loses this share a step, and is looked at again every so many steps.
SHAPE_DECAY, SHAPE_STEPS = 0.03, 16
MAX_CHANCE, MIN_SHAPE = 0.98, 0.05
# Sequences of a step pull the engine's averages with this weight, altogether.
AVERAGE_DECAY = 0.1


class RowView(NamedTuple):
    """A row of the next step: whose it is, and the most drafts that it has room for."""

    request_id: int
    room: int


class Outcome(NamedTuple):
    """What became of a row: how many drafts it was asked for (0: none), how many it proposed, and had accepted."""

    request_id: int
    asked: int
    proposed: int
    accepted: int


class _Sequence:
    """What is known of a sequence. `key` is its place among the rounded expectations."""

    __slots__ = ("key", "misses", "pause", "proposes", "resumes", "skill")

    def __init__(self, skill: float, proposes: float):
        self.skill, self.proposes = skill, proposes
        self.misses = self.pause = self.resumes = 0
        self.key = _key(skill, proposes)


def _key(skill: float, proposes: float) -> int:
    return int(skill * SKILL_LEVELS + 0.5) * (PROPOSES_LEVELS + 1) + int(proposes * PROPOSES_LEVELS + 0.5)


class Acceptance:
    """What all sequences' drafts came to. `widths` are the allowed ones, ascending."""

    def __init__(self, widths: tuple[int, ...], settings: PolicySettings):
        self.widths, self.settings = widths, settings
        self._max_width = widths[-1]
        self._sequences: dict[int, _Sequence] = {}
        self._skill, self._proposes = settings.first_skill, 1.0
        self._hits, self._expected = [0.0] * self._max_width, [0.0] * self._max_width
        self._weights = [1 - (1 - settings.skill_decay) ** trials for trials in range(self._max_width + 1)]
        self._proposed_at, self._accepted_at = [0] * self._max_width, [0] * self._max_width
        self._num_records = 0
        self._look_again()

    def expect(self, rows: Sequence[RowView], step: int) -> tuple[list[int], list[float]]:
        """Rooms of rows, 0 where the sequence pauses at `step`; and the accepted drafts to expect, by width."""
        rooms, curves = [], []
        sequences, known, most = self._sequences, self._curves, self._max_width
        for request_id, room in rows:
            sequence = sequences.get(request_id)
            if sequence is None:
                sequence = sequences[request_id] = _Sequence(self._skill, self._proposes)
            if room <= 0 or sequence.resumes > step:
                rooms.append(0)
                continue
            rooms.append(room)
            place = sequence.key * most + (room if room < most else most) - 1
            curve = known.get(place)
            if curve is None:
                curve = known[place] = self._curve(sequence.key, min(room, most))
            curves.append(curve)
        return rooms, [sum(column) for column in zip(*curves, strict=True)] or [0.0] * len(self.widths)

    def record(self, outcomes: Sequence[Outcome], step: int) -> int:
        """Takes in what became of a step's rows; returns how many drafts were accepted."""
        tallies: dict[tuple[int, int, int], list[float]] = {}
        sequences, prefix, weights = self._sequences, self._prefix, self._weights
        decay = self.settings.proposes_decay
        skills = shares = count = total = 0
        for request_id, asked, proposed, accepted in outcomes:
            sequence = sequences.get(request_id)
            if not asked or sequence is None:
                continue
            skill, share = sequence.skill, sequence.proposes
            tally = tallies.get((asked, proposed, accepted))
            if tally is None:
                tally = tallies[asked, proposed, accepted] = [0, 0.0]
            tally[0] += 1
            tally[1] += skill
            if proposed:
                trials = accepted + (accepted < proposed)
                hits = accepted / prefix[trials]
                skill += weights[trials] * ((hits if hits < 1 else 1) - skill)
                share += decay * (1 - share)
            else:
                share -= decay * share
            sequence.skill, sequence.proposes = skill, share
            sequence.key = _key(skill, share)
            if accepted:
                sequence.misses = sequence.pause = sequence.resumes = 0
            else:
                self._miss(sequence, step)
            skills += skill
            shares += share
            count += 1
            total += accepted
        if count:
            self._skill += AVERAGE_DECAY * (skills / count - self._skill)
            self._proposes += AVERAGE_DECAY * (shares / count - self._proposes)
            self._tally(tallies)
        return total

    def forget(self, request_id: int) -> None:
        """Drops what is known of a sequence that has ended."""
        self._sequences.pop(request_id, None)

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """How many drafts were proposed and accepted at each position."""
        return tuple(zip(self._proposed_at, self._accepted_at, strict=True))

    def _miss(self, sequence: _Sequence, step: int) -> None:
        sequence.misses += 1
        if sequence.misses >= self.settings.patience:
            sequence.pause = min(2 * sequence.pause or 1, self.settings.max_pause)
            sequence.resumes = step + 1 + sequence.pause

    def _tally(self, tallies: dict[tuple[int, int, int], list[float]]) -> None:
        """Counts by position. What a proposer leaves out is refused from its second draft on, in `shape`."""
        hits, expected = self._hits, self._expected
        keep = 1 - SHAPE_DECAY
        for at in range(self._max_width):
            hits[at] *= keep
            expected[at] *= keep
        for (asked, proposed, accepted), (count, skills) in tallies.items():
            for at in range(proposed):
                self._proposed_at[at] += count
            for at in range(accepted):
                self._accepted_at[at] += count
                hits[at] += count
            for at in range(min(accepted + 1, asked)):
                expected[at] += skills
        self._num_records += 1
        if self._num_records % SHAPE_STEPS == 0:
            self._look_again()

    def _look_again(self) -> None:
        """Works out the positions' shape anew; as good as the first where little was seen."""
        seen = zip(self._hits[1:], self._expected[1:], strict=True)
        self._shape = [1.0] + [max(MIN_SHAPE, min(1.0, (hits + 1) / (expected + 1))) for hits, expected in seen]
        self._prefix = [sum(self._shape[:trials]) for trials in range(self._max_width + 1)]
        self._curves: dict[int, tuple[float, ...]] = {}

    def _curve(self, key: int, room: int) -> tuple[float, ...]:
        """Accepted drafts to expect of a sequence at each width."""
        level, share = divmod(key, PROPOSES_LEVELS + 1)
        chance, total, sums = share / PROPOSES_LEVELS, 0.0, [0.0]
        for shape in self._shape[:room]:
            chance *= min(MAX_CHANCE, level / SKILL_LEVELS * shape)
            total += chance
            sums.append(total)
        return tuple(sums[min(width, room)] for width in self.widths)
