# SPDX-License-Identifier: Apache-2.0
"""What an engine moves beside its steps: states into the slots of sequences, to snapshots, and to the host and back.

All of it is dispatched in the order of the calls, so that a step reads what was moved before it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from metrale_jax.engine.arrays import padded
from metrale_jax.engine.device import FAILURES
from metrale_jax.engine.request import Request
from metrale_jax.engine.saved import SavedState


def into_slots(engine: Any, chunks: Sequence[tuple[Request, int]]) -> bool:
    """Whether anything was moved for requests that enter: states that were saved or found in a lower tier, and
    snapshots. A request whose state could not be moved is failed."""
    returned, restores = engine.roster.returned(), engine.roster.restores()
    for request, saved in returned:
        if request.lease is not None and saved is None:
            request.seq_len = 0  # nothing of it was written, so nothing may be kept
            engine.roster.requeue(request)
        elif request.lease is not None:
            _put_back(engine, request, saved)
    if restores and chunks:
        engine.guarded([request for request, _ in chunks], lambda: engine.device.copy_slots(restores))
    return bool(returned or restores)


def _put_back(engine: Any, request: Request, saved: SavedState) -> None:
    blocks = [[table[i] for i in held] for table, held in zip(request.lease.tables, saved.held, strict=True)]
    content = saved.blocks, saved.slot
    engine.guarded([request], partial(engine.device.write_state, blocks, request.slot, content))
    if request.lease is None:
        return
    if request.lease.drop_behind_windows(request.seq_len):
        engine.slots.write(request.slot, request.lease)
    if request.output and request.remaining == 1:
        # It lacks nothing but the run of its last token, and decodes on.
        engine.roster.resume(request)
        engine.draws.slots_changed()
        last = request.slot, request.output[-1]
        engine.device.put_tokens(*(padded([one], engine.shapes.num_slots) for one in last))


def copy_states(engine: Any, copies: Mapping[int, int]) -> None:
    """Copies slots, the source of each target, to forks and snapshots. Raises what the device does."""
    try:
        engine.device.copy_slots([(source, target) for target, source in copies.items()])
    except FAILURES:
        engine.memory.forget(distrusted=False)  # snapshots among them were never written
        raise


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
