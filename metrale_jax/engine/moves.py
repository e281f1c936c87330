# SPDX-License-Identifier: Apache-2.0
"""What an engine moves beside its steps: states into the slots of sequences, to snapshots, and to the host and back.

All of it is dispatched in the order of the calls, so that a step reads what was moved before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from metrale_jax.engine.arrays import padded
from metrale_jax.engine.device import FAILURES
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.request import Request
from metrale_jax.engine.saved import SavedState
from metrale_jax.engine.snapshots import KeptState


def into_slots(engine: Any, chunks: Sequence[tuple[Request, int]]) -> bool:
    """Whether anything was moved for requests that enter: states that were saved or found in a lower tier, and
    snapshots. A request whose state could not be moved is failed."""
    begun = engine.roster.begun()
    if begun:
        engine.guarded(begun, lambda: _begun(engine, begun, fresh=True))
    returned, (restores, tails) = engine.roster.returned(), engine.roster.restores()
    # Snapshots are copied from before any more are taken, which may be in their place.
    if restores and chunks:
        engine.guarded([request for request, _ in chunks], lambda: _restored(engine, restores, tails))
    for request, _ in chunks:
        engine.memory.let_go(request)
    for request, saved in returned:
        if request.lease is not None and saved is None:
            request.seq_len = 0  # nothing of it was written, so nothing may be kept
            engine.roster.requeue(request)
        elif request.lease is not None:
            _put_back(engine, request, saved)
    return bool(begun or returned or restores)


def _begun(engine: Any, requests: Sequence[Request], fresh: bool) -> None:
    for request in requests:
        engine.device.begin(request.slot, request.tokens(0, request.num_tokens), fresh)


def _restored(engine: Any, restores: Sequence[tuple[int, int]], tails: Sequence[BlockCopy]) -> None:
    if tails:
        engine.device.copy_blocks(tails)
    engine.device.copy_slots(restores)


def _put_back(engine: Any, request: Request, saved: SavedState) -> None:
    blocks = [[table[i] for i in held] for table, held in zip(request.lease.tables, saved.held, strict=True)]
    content = saved.blocks, saved.slot
    engine.guarded([request], partial(engine.device.write_state, blocks, request.slot, content))
    if request.lease is None:
        return
    if request.lease.drop_behind_windows(request.seq_len):
        engine.slots.write(request.slot, request.lease)
    if saved.for_all:  # without what windows have left, into which nothing was put
        copies = Copies()
        copies.add(request, engine.memory.promote(request), 0)
        engine.guarded([request], partial(copies.run, engine, None, 0))
        if request.lease is None:
            return
        engine.slots.write(request.slot, request.lease)
    if request.output and request.remaining == 1:
        # It lacks nothing but the run of its last token, and decodes on.
        engine.roster.resume(request)
        engine.draws.slots_changed()
        last = request.slot, request.output[-1]
        engine.device.put_tokens(*(padded([one], engine.shapes.num_slots) for one in last))


@dataclass
class Copies:
    """What one step leaves of its sequences elsewhere, each by its target: one may be taken twice in a step, and the
    second is who keeps it. `slots` are copied to forks and snapshots, `blocks` to tails, and hidden `rows`, by their
    place among the ends of the step's chunks, to units. Before that the states of `limited` slots are, and after it the
    requests that have `begun` in slots that were copied to."""

    slots: dict[int, int] = field(default_factory=dict)
    blocks: dict[tuple[int, int], BlockCopy] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    limited: list[int] = field(default_factory=list)
    begun: list[Request] = field(default_factory=list)

    def limit(self, request: Request, norm_tokens: int) -> None:
        """The state of a request that stands where states are limited, after every `norm_tokens`, is."""
        if norm_tokens and not request.seq_len % norm_tokens:
            self.limited.append(request.slot)

    def add(self, request: Request, kept: KeptState, row: int) -> None:
        """What is kept of a request, whose chunk is `row` of them."""
        self.slots[kept.unit] = request.slot
        self.blocks |= {(copy.group, copy.target): copy for copy in kept.copies}
        self.rows[kept.row_unit] = row

    def run(self, engine: Any, hidden: Any, num_rows: int) -> None:
        """Copies all; `hidden` are the step's rows, the last `num_rows` of them ends of chunks. Raises what the device
        does."""
        for by_target in (self.slots, self.rows):
            by_target.pop(0, None)
        try:
            if self.limited:
                engine.device.limit_slots(self.limited)
            if self.blocks:
                engine.device.copy_blocks(list(self.blocks.values()))
            if self.slots:
                engine.device.copy_slots([(source, target) for target, source in self.slots.items()])
            if self.rows:
                units = {row: unit for unit, row in self.rows.items()}
                engine.device.keep_rows(hidden, padded([units.get(row, 0) for row in range(num_rows)], num_rows))
            _begun(engine, self.begun, fresh=False)
        except FAILURES:
            engine.memory.forget(distrusted=False)  # snapshots among them were never written
            raise
        if engine.memory.snapshots is not None:
            engine.memory.snapshots.written()


def saved_state(engine: Any, request: Request) -> SavedState | None:
    """A copy of what a settled request holds; None if it shares that with other answers, is having its prompt scored,
    or the device fails."""
    scoring = request.params.prompt_logprobs is not None and not request.output
    if request.search is not None or request.followers or not request.seq_len or request.finished or scoring:
        return None
    memory, device = engine.memory, engine.device
    blocks = memory.held_blocks(request)
    content = engine.guarded((), lambda: device.fetch((device.read_blocks(blocks), device.read_slot(request.slot))))
    if content is None or request.lease is None:
        return None  # it can be run again
    return memory.saved_state(request, *content, num_bytes=device.num_bytes(content))


def settle_spilled(engine: Any) -> None:
    """Takes in what the pool gave up and the device has read by now."""
    spill = engine.memory.spill
    if spill is None:
        return
    try:
        spill.tier.settle(engine.device.fetch)
    except FAILURES as error:
        engine.recover((), f"the device could not run the step ({error})", pool_lost=True)


def spill_kept(engine: Any) -> None:
    """Copies whatever the prefix tree keeps to the lower tier, where there is one; it stays in the tree."""
    spill = engine.memory.spill
    if spill is None:
        return
    engine.settle()
    nodes = engine.memory.tree.kept()
    spill.give_up_blocks(nodes)
    for node in nodes:
        if node.snapshot:
            spill.give_up_state(node, node.snapshot)
    settle_spilled(engine)
