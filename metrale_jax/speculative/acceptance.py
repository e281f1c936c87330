# SPDX-License-Identifier: Apache-2.0
"""`Acceptance`: how many drafts of each sequence are likely to be accepted, and which sequences pause.

A sequence has one `skill`, the chance that a draft is accepted where those before it were, and one chance that it is
proposed anything. That makes `skill + skill² + …` accepted drafts; what that is wrong by at a width (later positions
are guessed worse, skill comes in bursts, less is proposed than asked) is the same sort of wrong for all sequences, so
the engine learns it as one factor a width. A new sequence starts at the engine's averages.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import NamedTuple

from metrale_jax.speculative.settings import PolicySettings

# Skills and shares are rounded to these many levels, so that few different expectations are computed.
SKILL_LEVELS, SHARE_LEVELS = 40, 10
MAX_SKILL = 0.98
# A sequence that is this sure to be proposed something stays so until it is not.
SURE = 0.995
# What the engine knows of widths loses this share a step, and starts as if so many drafts had come as expected.
FACTOR_DECAY, FACTOR_DRIFT, FACTOR_START = 0.01, 0.05, 5.0
# Sequences of a step pull the engine's averages with this weight, altogether.
AVERAGE_DECAY = 0.1
REPLY = itemgetter(1, 2, 3)


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
    """What is known of a sequence. `level` is its share rounded, `curve` what it promises where there is room."""

    __slots__ = ("curve", "level", "misses", "pause", "proposes", "resumes", "skill")

    def __init__(self, skill: float, proposes: float):
        self.skill, self.proposes = skill, proposes
        self.level = int(proposes * SHARE_LEVELS + 0.5)
        self.misses = self.pause = self.resumes = 0


class Acceptance:
    """What all sequences' drafts came to. `widths` are the allowed ones, ascending."""

    def __init__(self, widths: tuple[int, ...], settings: PolicySettings):
        self.widths, self.settings = widths, settings
        self._sequences: dict[int, _Sequence] = {}
        self._skill, self._proposes = settings.first_skill, 1.0
        self._came, self._expected = [FACTOR_START] * len(widths), [FACTOR_START] * len(widths)
        self._moves = [[_move(settings.skill_decay, hits, miss) for hits in range(widths[-1] + 1)] for miss in (0, 1)]
        levels = range(SKILL_LEVELS + 1)
        self._curves = [[_curve(skill, share, widths) for skill in levels] for share in range(SHARE_LEVELS + 1)]
        self._proposed_at, self._accepted_at = [0] * widths[-1], [0] * widths[-1]

    def expect(self, rows: Sequence[RowView], step: int) -> tuple[list[int], list[float]]:
        """Rooms of rows, 0 where the sequence pauses at `step`; and the accepted drafts to expect, by width."""
        rooms, curves = [], []
        sequences, most = self._sequences, self.widths[-1]
        for request_id, room in rows:
            sequence = sequences.get(request_id) or self._started(request_id)
            if room <= 0 or sequence.resumes > step:
                rooms.append(0)
            else:
                rooms.append(room)
                curves.append(sequence.curve if room >= most else self._short(sequence, room))
        return rooms, [total * self._factor(at) for at, total in enumerate(self._summed(curves))]

    def record(self, width: int, outcomes: Sequence[Outcome], step: int) -> int:
        """Takes in what became of the rows of a step of `width`; returns how many drafts were accepted."""
        sequences, moves, curves, curve_of = self._sequences, self._moves, [], self._curves
        for request_id, asked, proposed, accepted in outcomes:
            sequence = sequences.get(request_id)
            if not asked or sequence is None:
                continue
            curves.append(sequence.curve if asked >= width else self._short(sequence, asked))
            if proposed != asked or sequence.proposes < SURE:
                self._replied(sequence, proposed > 0)
            if proposed:
                keep, more = moves[accepted < proposed][accepted]
                sequence.skill = skill = keep * sequence.skill + more
                sequence.curve = curve_of[sequence.level][int(skill * SKILL_LEVELS + 0.5)]
            if not accepted:
                self._miss(sequence, step)
            elif sequence.misses:
                sequence.misses = sequence.pause = sequence.resumes = 0
        return self._count(width, Counter(map(REPLY, outcomes)), self._summed(curves))

    def forget(self, request_id: int) -> None:
        """Drops what is known of a sequence that has ended."""
        self._sequences.pop(request_id, None)

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """How many drafts were proposed and accepted at each position."""
        return tuple(zip(self._proposed_at, self._accepted_at, strict=True))

    def _miss(self, sequence: _Sequence, step: int) -> None:
        sequence.misses += 1
        hopeless = sequence.skill * sequence.proposes < self.settings.pause_below
        if hopeless and sequence.misses >= self.settings.patience:
            sequence.pause = min(2 * sequence.pause or 1, self.settings.max_pause)
            sequence.resumes = step + 1 + sequence.pause

    def _count(self, width: int, counts: dict[tuple[int, int, int], int], expected: list[float]) -> int:
        """Takes in a step's replies for all sequences together; returns how many drafts were accepted."""
        asks = proposals = trials = hits = 0
        came = [0] * len(self.widths)
        for (asked, proposed, accepted), count in counts.items():
            asks += count * (asked > 0)
            proposals += count * (proposed > 0)
            trials += count * (accepted + (accepted < proposed))
            hits += count * accepted
            for at in range(proposed):
                self._proposed_at[at] += count
                self._accepted_at[at] += count * (at < accepted)
            for at, least in enumerate(self.widths):
                came[at] += count * min(accepted, least)
        if asks:
            self._proposes += AVERAGE_DECAY * (proposals / asks - self._proposes)
            self._compare(width, came, expected)
        if trials:
            self._skill += AVERAGE_DECAY * (hits / trials - self._skill)
        return hits

    def _compare(self, width: int, came: list[int], expected: list[float]) -> None:
        """Sets what came against what was expected, up to `width`.

        Wider ones drift to what the widest of these says: what they were once found to be would else stay.
        """
        factor = 1.0
        for at, least in enumerate(self.widths):
            if least <= width:
                self._came[at] += came[at] - FACTOR_DECAY * self._came[at]
                self._expected[at] += expected[at] - FACTOR_DECAY * self._expected[at]
                factor = self._factor(at)
            else:
                self._came[at] += FACTOR_DRIFT * (FACTOR_START * factor - self._came[at])
                self._expected[at] += FACTOR_DRIFT * (FACTOR_START - self._expected[at])

    def _factor(self, at: int) -> float:
        """What came of the drafts of a width, in what skills promised."""
        return (self._came[at] + 1) / (self._expected[at] + 1)

    def _started(self, request_id: int) -> _Sequence:
        """A new sequence, at the engine's averages."""
        sequence = self._sequences[request_id] = _Sequence(self._skill, self._proposes)
        sequence.curve = self._curves[sequence.level][_level(sequence.skill)]
        return sequence

    def _replied(self, sequence: _Sequence, proposed: bool) -> None:
        sequence.proposes += self.settings.proposes_decay * (proposed - sequence.proposes)
        sequence.level = int(sequence.proposes * SHARE_LEVELS + 0.5)
        sequence.curve = self._curves[sequence.level][_level(sequence.skill)]

    def _short(self, sequence: _Sequence, room: int) -> tuple[float, ...]:
        """The curve of a sequence that lacks room for the widest."""
        return _curve(_level(sequence.skill), sequence.level, tuple([min(width, room) for width in self.widths]))

    def _summed(self, curves: list[tuple[float, ...]]) -> list[float]:
        return [sum(column) for column in zip(*curves, strict=True)] or [0.0] * len(self.widths)


def _level(skill: float) -> int:
    return int(skill * SKILL_LEVELS + 0.5)


@cache
def _curve(skill: int, share: int, lens: tuple[int, ...]) -> tuple[float, ...]:
    """Accepted drafts to expect of a sequence of these levels that drafts each of `lens`."""
    chance, sums = share / SHARE_LEVELS, [0.0]
    for _ in range(lens[-1]):
        chance *= min(MAX_SKILL, skill / SKILL_LEVELS)
        sums.append(sums[-1] + chance)
    return tuple(sums[length] for length in lens)


def _move(decay: float, hits: int, miss: int) -> tuple[float, float]:
    """What a verified row does to a skill, as factor and addend: each of its drafts weighs `decay`."""
    trials = hits + miss
    keep = (1 - decay) ** trials
    return keep, (1 - keep) * hits / trials if trials else 0.0
