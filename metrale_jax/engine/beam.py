# SPDX-License-Identifier: Apache-2.0
"""`BeamSearch`: which continuations of a prompt go on, which are finished, and when to stop. No arrays of the device.

The definitions are those of transformers' `generate(num_beams=..., do_sample=False)`, so that scores and hypotheses can
be compared with it: sums are float32, a hypothesis scores `sum of log-probabilities / length ** length_penalty` with
its stop token counted in both, and one that stops must be among the `width` best candidates of its step to count.

Candidates of equal sum are ordered by beam, then by token id; of equal score, the hypothesis that finished first leads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import RequestError

# exp(88) is the last whole power of e that float32 holds.
MAX_LOG_NORM = 88.0


@dataclass(frozen=True)
class Beam:
    """A continuation that still grows: its token ids and the float32 sum of their log-probabilities."""

    tokens: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation: token ids (with the stop id that ended it), score, float32 sum of log-probabilities."""

    tokens: tuple[int, ...]
    score: float
    logprob: float


@dataclass(frozen=True)
class Advance:
    """The next rows, best first: beam i continues row `parents[i]` of this step with `tokens[i]`. None if `done`."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    done: bool


class BeamSearch:
    """The search for one request. Begins with one row, the prompt; `advance` takes it from step to step until `done`.

    `early_stopping` says when `width` finished hypotheses are enough: True, at once; False, as soon as the best beam,
    scored at its present length, would not beat the worst of them; "never", as soon as it could not even at
    `max_tokens` (the length that flatters a sum most if `length_penalty` is above 0). `width` 1 is greedy decoding.
    Raises `RequestError` for values out of range.
    """

    def __init__(
        self,
        width: int,
        num_return: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        length_penalty: float,
        early_stopping: bool | str,
    ):
        _check(width, num_return, max_tokens, length_penalty, early_stopping)
        self._width = width
        self._num_return = num_return
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        # Greedy decoding ends with its first stop token, however well another path might go on.
        self._stops_when_full = early_stopping is True or width == 1
        self._counts_on_length = early_stopping == "never" and length_penalty > 0
        self._live: tuple[Beam, ...] = (Beam((), 0.0),)
        self._finished: list[Hypothesis] = []

    @property
    def candidates_per_row(self) -> int:
        """Most likely tokens that each row must deliver, or the whole vocabulary where that is smaller.

        One row can supply all `width` next beams, with every stop id ranked above them.
        """
        return self._width + len(self._stop_ids)

    @property
    def live(self) -> tuple[Beam, ...]:
        """The beams behind the rows of the next step, in their order; none once `done`."""
        return self._live

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return not self._live

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The `num_return` best hypotheses finished so far, best first; fewer if no more sequences are possible."""
        return tuple(self._finished[: self._num_return])

    def advance(self, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Advance:
        """The rows of the next step, from at least `candidates_per_row` tokens `[rows, k]` of each row of this one.

        `logprobs` go with `ids`, in any order within a row. They are the log-softmax of the plain logits with penalties
        and masks applied after it, as transformers has it; a token at minus infinity is forbidden.
        """
        assert self._live, "a search that is done cannot advance"
        candidates = self._ranked(np.asarray(ids), np.asarray(logprobs, np.float32))
        length = len(self._live[0].tokens) + 1
        growing, ended = [], []
        for rank, (parent, token, logprob) in enumerate(candidates):
            if length == self._max_tokens or token in self._stop_ids:
                if rank < self._width:
                    ended.append((parent, token, logprob))
            elif len(growing) < self._width:
                growing.append((parent, token, logprob))
        found = [
            Hypothesis((*self._live[parent].tokens, token), self._score(logprob, length), logprob)
            for parent, token, logprob in ended
        ]
        # The sort is stable: among equals the earlier one leads.
        self._finished = sorted([*self._finished, *found], key=lambda item: -item.score)[: self._width]
        if not growing or not self._worth_going_on(growing[0][2], length):
            growing = []
        self._live = tuple(Beam((*self._live[parent].tokens, token), logprob) for parent, token, logprob in growing)
        parents = tuple(parent for parent, _, _ in growing)
        return Advance(parents, tuple(token for _, token, _ in growing), self.done)

    def _ranked(self, ids: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, int, float]]:
        """(row, token id, sum) of every candidate that is not forbidden, best first."""
        rows = len(self._live)
        assert ids.shape == logprobs.shape and len(ids) == rows, f"{ids.shape}, {logprobs.shape} for {rows} rows"
        assert not np.isnan(logprobs).any(), "a log-probability is not a number"
        sums = np.asarray([beam.logprob for beam in self._live], np.float32)[:, None] + logprobs
        parents = np.broadcast_to(np.arange(rows)[:, None], ids.shape)
        order = np.lexsort((ids.ravel(), parents.ravel(), -sums.ravel()))
        ranked = zip(*(values.ravel()[order].tolist() for values in (parents, ids, sums)), strict=True)
        return [candidate for candidate in ranked if candidate[2] > -math.inf]

    def _worth_going_on(self, best_logprob: float, length: int) -> bool:
        if len(self._finished) < self._width:
            return True
        if self._stops_when_full:
            return False
        hoped_length = self._max_tokens if self._counts_on_length else length
        return self._score(best_logprob, hoped_length) > self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return float(np.float32(logprob) / np.float32(length**self._length_penalty))


def _check(width, num_return, max_tokens, length_penalty, early_stopping):
    if width < 1:
        raise RequestError(f"beam width {width} is below 1; use 1 for greedy decoding or more.")
    if not 1 <= num_return <= width:
        raise RequestError(
            f"n={num_return} is not from 1 to the beam width {width}; widen the search or ask for fewer."
        )
    if max_tokens < 1:
        raise RequestError(f"max_tokens={max_tokens} is below 1; ask for at least one token.")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise RequestError(f"early_stopping={early_stopping!r} is unknown; use True, False or 'never'.")
    if not abs(length_penalty) * math.log(max_tokens) < MAX_LOG_NORM:
        raise RequestError(
            f"length_penalty={length_penalty} over {max_tokens} tokens is outside float32; use a value around 1."
        )
