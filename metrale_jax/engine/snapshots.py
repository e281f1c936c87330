# SPDX-License-Identifier: Apache-2.0
"""`Snapshots`: slots of the pool in which states of recurrent layers are kept for later prompts (Pan et al. 2024).

Keys and values serve any prompt that begins with their tokens, however much of them it shares. A recurrent state serves
just those that share all of what it has taken in, so what matters is where states are kept: at the ends of chunks and
of prompts, where a second prompt was seen to branch off, and now and then while an answer grows.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.leaves import Node


@dataclass(frozen=True)
class SnapshotPolicy:
    """Where snapshots are taken: with `chunk_ends` wherever a chunk of a prompt ends with a block; with `last_block` at
    the end of a prompt's last whole block, for which its last chunk is cut; with `branches` where a prompt leaves one
    that was run before, for which it is cut too; and every `decode_blocks` blocks of an answer, 0 for never, of which
    the last is kept when it ends. A prompt is not cut for less than `min_tokens` tokens since what it found cached.

    With `whole_prompts` one is taken at the very end of each prompt too, with the hidden row there: of a prompt that
    comes again nothing is run, its first token is drawn from that row."""

    chunk_ends: bool = True
    last_block: bool = True
    branches: bool = True
    decode_blocks: int = 4
    min_tokens: int = 32
    whole_prompts: bool = True


DEFAULT_POLICY = SnapshotPolicy()


@dataclass(frozen=True)
class Checkpoint:
    """A snapshot that no node has yet: `unit` holds the state of a running sequence after `num_tokens` tokens."""

    unit: int
    num_tokens: int
    generation: int


@dataclass(frozen=True)
class KeptState:
    """What is to be copied of a sequence where a chunk ended: its state to `unit`, its hidden row to that of
    `row_unit`, 0 for nowhere, and the blocks of its tail."""

    unit: int = 0
    row_unit: int = 0
    copies: tuple[BlockCopy, ...] = ()


NOTHING_KEPT = KeptState()


@dataclass(frozen=True)
class SnapshotStats:
    """Snapshots kept now, those of running sequences, units in all, and counts since the beginning."""

    num_kept: int
    num_running: int
    num_units: int
    taken: int
    hits: int
    evicted: int


NO_SNAPSHOTS = SnapshotStats(0, 0, 0, 0, 0, 0)


class Snapshots:
    """Units `first` to `first + count - 1`, each free, attached to a node, or the checkpoint of a running sequence.

    The one that is evicted saves the least recomputation for its bytes, by age: units are equally large, and a snapshot
    is worth the tokens between it and the next one above it, counted from a clock that stands at the worth of what was
    last evicted (GreedyDual, Young 1994). Checkpoints take at most half of the units.
    """

    def __init__(self, first: int, count: int):
        self._units = range(first, first + count)
        self._taken = self._hits = self._evicted = 0
        self._generation = 0
        self.on_evict: Callable[[Node, int], None] = lambda node, unit: None
        self.on_loss: Callable[[Node], None] = lambda node: None
        self.clear()

    @property
    def stats(self) -> SnapshotStats:
        """What is held, and what was."""
        counts = self._taken, self._hits, self._evicted
        return SnapshotStats(len(self._nodes), len(self._running), len(self._units), *counts)

    def clear(self) -> None:
        """Forgets all that is held; checkpoints from before are of no more use."""
        self._free = list(reversed(self._units))
        self._nodes: dict[int, Node] = {}
        self._worth: dict[int, int] = {}
        self._running: set[int] = set()
        self._unwritten: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        self._clock = 0
        self._generation += 1

    def take(self, node: Node) -> int:
        """A unit for the state at the end of `node`, which has it from now on; 0 if it has one or none can be had."""
        if node.snapshot:
            self._value(node)
            return 0
        unit = self._claim()
        if unit:
            self._unwritten.add(unit)
            self._attach(node, unit)
        return unit

    def take_row(self, node: Node) -> int:
        """The unit that the hidden row at the end of `node` is to be kept with; 0 if it is, or there is no state."""
        if node.has_row or not node.snapshot:
            return 0
        node.has_row = True
        return node.snapshot

    def checkpoint(self, num_tokens: int) -> Checkpoint | None:
        """A unit for the state of a running sequence, None where too many have one."""
        unit = 0 if len(self._running) >= len(self._units) // 2 else self._claim()
        if not unit:
            return None
        self._unwritten.add(unit)
        self._running.add(unit)
        return Checkpoint(unit, num_tokens, self._generation)

    def written(self) -> None:
        """To be called when the copies into all units that were handed out are dispatched: until then what such a unit
        holds is another's, and is not to be read if it is evicted."""
        self._unwritten.clear()

    def keep(self, checkpoint: Checkpoint, node: Node | None) -> None:
        """The checkpoint becomes the snapshot of `node`; it is freed where that is None or has one."""
        if checkpoint.generation != self._generation:
            return
        self._running.remove(checkpoint.unit)
        if node is None or node.snapshot:
            self._free.append(checkpoint.unit)
        else:
            self._attach(node, checkpoint.unit)

    def use(self, node: Node) -> int:
        """The unit of `node`, which a prompt goes on from."""
        self._hits += 1
        self._value(node)
        return node.snapshot

    def drop(self, node: Node) -> None:
        """Frees what `node` has, which is no more."""
        if node.snapshot:
            if node.snapshot not in self._unwritten:
                self.on_evict(node, node.snapshot)
            del self._nodes[node.snapshot], self._worth[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot, node.has_row = 0, False

    def check(self, nodes: list[Node]) -> None:
        """Asserts that each unit is in one place, and that `nodes`, all there are, agree."""
        assert {node.snapshot: node for node in nodes if node.snapshot} == self._nodes, "a node has another's snapshot"
        held = [*self._free, *self._nodes, *self._running]
        assert sorted(held) == list(self._units), "a snapshot is nowhere, or in two places"
        assert set(self._worth) == set(self._nodes)
        assert all(node.snapshot for node in nodes if node.has_row), "a row without a state"

    def _attach(self, node: Node, unit: int) -> None:
        node.snapshot = unit
        self._nodes[unit] = node
        self._taken += 1
        self._value(node)

    def _value(self, node: Node) -> None:
        unit = node.snapshot
        self._worth[unit] = max(self._worth.get(unit, 0), self._clock + _blocks_saved(node))
        heapq.heappush(self._heap, (self._worth[unit], unit))

    def _claim(self) -> int:
        if self._free:
            return self._free.pop()
        while self._heap:
            worth, unit = heapq.heappop(self._heap)
            if self._worth.get(unit) != worth:
                continue  # it was used since, or is gone
            self._clock = worth
            self._evicted += 1
            node = self._nodes[unit]
            self.drop(node)
            self.on_loss(node)
            return self._free.pop()
        return 0


def _blocks_saved(node: Node) -> int:
    """Blocks that have to be run to come from the next snapshot above to `node`."""
    above = node.parent
    while above.parent is not None and not above.snapshot:
        above = above.parent
    return node.depth - above.depth
