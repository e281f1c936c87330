# SPDX-License-Identifier: Apache-2.0
"""`Search`: the beams of one request as sequences of the engine, forked and dropped as `BeamSearch` decides.

Beams draw nothing: a step gives each its likeliest tokens, the host chooses, and the chosen tokens are put where the
next step looks for them. So a search waits for every step that it is in to be read, while others run ahead.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from metrale_jax.engine.beam import BeamSearch, Hypothesis
from metrale_jax.engine.request import Request


class Search:
    """The search of `leader`, whose own lease and slot serve its first beam; its followers serve the others."""

    def __init__(self, leader: Request, num_ids: int):
        self.leader = leader
        self.rows = [leader, *(_beam_row(leader, leader.request_id + index) for index in range(1, num_ids))]
        for row in self.rows:
            row.search = self
        self.restart()

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that each beam needs."""
        return self._beams.candidates_per_row

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What was found, best first."""
        return self._beams.hypotheses

    def restart(self) -> None:
        """Back to the prompt: nothing is drawn, so the same search comes of it."""
        params = self.leader.params
        self._beams = BeamSearch(
            width=params.beam_width,
            num_return=params.n,
            max_tokens=self.leader.max_tokens,
            stop_ids=self.leader.stop_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.leader.followers = self.rows[1:]
        self.copies: list[tuple[int, int]] = []
        for row in self.rows:
            row.output.clear()
            row.in_flight = 0

    def advance(self, ids: np.ndarray, logprobs: np.ndarray) -> bool:
        """Takes the candidates `[beams, k]` of the last step; whether the search is done.

        Else the first rows hold the beams that go on, each with a lease and a slot of its own and all its tokens, in
        order. `copies` are pairs of slots: what layers keep in the first, the second has to get before the next step.
        """
        num_rows = len(self._beams.live)
        step = self._beams.advance(ids, logprobs)
        if step.done:
            return True
        old = [(row.lease, row.slot) for row in self.rows[:num_rows]]
        seq_len, known_len = self.leader.seq_len, self.leader.known_len
        spare = [row.slot for index, row in enumerate(self.rows) if index not in step.parents]
        kept: set[int] = set()
        held = []
        self.copies = []
        for parent in step.parents:
            lease, slot = old[parent]
            if parent in kept:
                lease, source, slot = lease.fork(), slot, spare.pop()
                self.copies.append((source, slot))
            held.append((lease, slot))
            kept.add(parent)
        for parent, (lease, _) in enumerate(old):
            if parent not in kept:
                lease.release()
        held += [(None, slot) for slot in spare]
        for row, (lease, slot) in zip(self.rows, held, strict=True):
            row.lease, row.slot = lease, slot
        for row, beam in zip(self.rows, self._beams.live, strict=False):
            row.output, row.seq_len, row.known_len = list(beam.tokens), seq_len, known_len
        return False

    @property
    def beams(self) -> list[Request]:
        """The rows of the next step."""
        return [row for row in self.rows if row.lease is not None]


def _beam_row(leader: Request, request_id: int) -> Request:
    return replace(leader, request_id=request_id, output=[], logprobs=[], prompt_logprobs=[], followers=[])


def search_rows(drawing: Sequence[tuple[int, Request]]) -> list[tuple["Search", list[tuple[int, Request]]]]:
    """The searches among rows that are to draw, each with its own rows."""
    found: dict[int, tuple[Search, list[tuple[int, Request]]]] = {}
    for row, request in drawing:
        search = request.search
        if search is not None:
            found.setdefault(search.leader.request_id, (search, []))[1].append((row, request))
    return list(found.values())
