# SPDX-License-Identifier: Apache-2.0
"""`plan_step`: what the next step does, decided by a pure function on host data.

First come, first served. Prefill and decode steps alternate while both have work, so that a long prompt delays
running answers by one chunk at a time. Nothing here allocates: the loop does, and comes back if it cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A request with tokens to prefill: how many are left, and how many blocks it lacks to hold them and one more."""

    request_id: int
    remaining: int
    missing_blocks: int
    holds_row: bool


@dataclass(frozen=True)
class View:
    """What the scheduler sees: `waiting` in order of arrival, ids of `running`, free rows and free blocks."""

    waiting: Sequence[Waiting]
    running: Sequence[int]
    free_rows: int
    free_blocks: int
    last_was_prefill: bool


@dataclass(frozen=True)
class Budget:
    """Limits of a step."""

    prefill_tokens: int
    prefill_rows: int


@dataclass(frozen=True)
class Chunk:
    """Prefill `num_tokens` more of a request."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """Either chunks to prefill, or ids to decode, or neither."""

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()


def plan_step(view: View, budget: Budget) -> StepPlan:
    """The next step.

    A request enters only if the blocks for its whole prompt are free, since half a prompt is no use, and with one to
    spare for each running answer, since else the next decode step would throw it out again.
    """
    if view.running and view.last_was_prefill:
        return StepPlan(decode=tuple(view.running))
    chunks = _chunks(view, budget)
    if chunks:
        return StepPlan(prefill=chunks)
    return StepPlan(decode=tuple(view.running))


def _chunks(view: View, budget: Budget) -> tuple[Chunk, ...]:
    tokens, rows, blocks = budget.prefill_tokens, view.free_rows, view.free_blocks - len(view.running)
    chunks: list[Chunk] = []
    for item in view.waiting:
        enters = not item.holds_row
        lacks = item.missing_blocks if enters else 0
        if len(chunks) == budget.prefill_rows or tokens == 0 or (enters and (rows == 0 or lacks > blocks)):
            break
        size = min(item.remaining, tokens)
        chunks.append(Chunk(item.request_id, size))
        tokens -= size
        blocks -= lacks
        rows -= enters
    return tuple(chunks)
