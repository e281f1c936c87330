# SPDX-License-Identifier: Apache-2.0
"""`plan_chunks`: which prompts the next step takes further, decided by a pure function on host data.

Decoding comes first and is in every step; chunks of prompts fill the token budget beside it, so that a long prompt
delays running answers by one chunk's time and never stops them. Who waits enters in order; one that does not fit keeps
its turn, since passing it would starve it. Nothing here allocates: the loop does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cuts:
    """Where chunks of a prompt are to end: after one of `stops` more tokens, in ascending order, or where that is not
    reached after `lead` tokens and whole blocks of `grain`, if there are that many. The default is anywhere."""

    stops: tuple[int, ...] = ()
    lead: int = 0
    grain: int = 1

    def limited(self, num_tokens: int, remaining: int) -> int:
        """The tokens of a chunk that may have up to `num_tokens`, of `remaining` left to run."""
        num_tokens = min(num_tokens, remaining, *self.stops[:1])
        if num_tokens == remaining or num_tokens in self.stops[:1] or num_tokens < self.lead + self.grain:
            return num_tokens
        return num_tokens - (num_tokens - self.lead) % self.grain


ANYWHERE = Cuts()


@dataclass(frozen=True)
class Filling:
    """A prompt under way: tokens left to run."""

    request_id: int
    remaining: int
    cuts: Cuts = ANYWHERE


@dataclass(frozen=True)
class Waiting:
    """A request that could enter: tokens left to run after what is cached, blocks and slots that it lacks to begin."""

    request_id: int
    remaining: int
    missing_blocks: int
    slots: int = 1
    cuts: Cuts = ANYWHERE


@dataclass(frozen=True)
class View:
    """What the scheduler sees. `filling` and `waiting` are in order of service; `waiting` is read no further than it
    takes, and free blocks include those that eviction would give."""

    filling: Sequence[Filling]
    waiting: Iterable[Waiting]
    num_decoding: int
    free_slots: int
    free_blocks: int


@dataclass(frozen=True)
class Budget:
    """Limits of a step's prompt chunks, the `sizes` in ascending order that their tokens are padded to, and how many
    tokens take as long as the rest of a step does."""

    prefill_tokens: int
    prefill_rows: int
    sizes: tuple[int, ...] = ()
    step_tokens: int = 0

    def worth_running(self, num_tokens: int) -> int:
        """How many of `num_tokens` to run now: all, or so many that they fill a size and the rest a smaller one."""
        whole = self._padded(num_tokens)
        costs = {part: part + self.step_tokens + self._padded(num_tokens - part) for part in self.sizes}
        parts = [part for part in reversed(self.sizes) if part < num_tokens and costs[part] < whole]
        return min(parts, key=costs.get, default=num_tokens)

    def _padded(self, num_tokens: int) -> int:
        return next((size for size in self.sizes if size >= num_tokens), num_tokens)


@dataclass(frozen=True)
class Chunk:
    """Prefill `num_tokens` more of a request; `enters` if it was waiting."""

    request_id: int
    num_tokens: int
    enters: bool = False


def plan_chunks(view: View, budget: Budget) -> tuple[Chunk, ...]:
    """The chunks of the next step, beside the sequences that decode in it.

    A request enters only if the blocks for its whole prompt are free, since half a prompt is no use, and with one to
    spare for each running answer, since else the next step would throw it out again. The budget is for prompts alone:
    decoding takes nothing from it. Where much of the step would be padding, its last chunk is cut, if that is enough:
    nobody who fits is kept out for it.
    """
    chunks, cuts = _chunks_within(view, budget)
    total = sum(chunk.num_tokens for chunk in chunks)
    excess = total - budget.worth_running(total)
    if excess and chunks[-1].num_tokens > excess:
        size = chunks[-1].num_tokens
        chunks[-1] = replace(chunks[-1], num_tokens=cuts[-1].limited(size - excess, size))
    return tuple(chunks)


def _chunks_within(view: View, budget: Budget) -> tuple[list[Chunk], list[Cuts]]:
    tokens, blocks, slots = budget.prefill_tokens, view.free_blocks - view.num_decoding, view.free_slots
    chunks: list[Chunk] = []
    cuts: list[Cuts] = []
    for item in view.filling:
        if not tokens or len(chunks) == budget.prefill_rows:
            return chunks, cuts
        size = item.cuts.limited(tokens, item.remaining)
        chunks.append(Chunk(item.request_id, size))
        cuts.append(item.cuts)
        tokens -= size
    waiting = iter(view.waiting)
    while tokens and slots > 0 and len(chunks) < budget.prefill_rows:
        item = next(waiting, None)
        if item is None or item.slots > slots or item.missing_blocks > blocks:
            break
        size = item.cuts.limited(tokens, item.remaining)
        chunks.append(Chunk(item.request_id, size, enters=True))
        cuts.append(item.cuts)
        tokens, blocks, slots = tokens - size, blocks - item.missing_blocks, slots - item.slots
    return chunks, cuts
