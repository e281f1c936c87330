# SPDX-License-Identifier: Apache-2.0
"""`KeptBlocks`: the references that a `RadixTree` has on blocks, and how many of them nobody else holds."""

from collections.abc import Sequence

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.leaves import Node


class KeptBlocks:
    """One reference on each block of a tree's nodes; `counts` of them and of those that are `evictable`, by group."""

    def __init__(self, allocators: tuple[BlockAllocator, ...]):
        self.allocators = allocators
        self.clear()

    def clear(self) -> None:
        """Counts from nothing: the nodes are gone."""
        self.counts, self.evictable = [0] * len(self.allocators), [0] * len(self.allocators)

    def take(self, node: Node) -> None:
        """References on the blocks of a new node."""
        for group, block in enumerate(node.blocks):
            if block:
                self.allocators[group].share([block])
                self.counts[group] += 1

    def fill(self, node: Node, blocks: Sequence[int]) -> None:
        """Takes `blocks` for the holes of a pinned node, but for those that anybody but the caller holds."""
        filled = list(node.blocks)
        for group, block in enumerate(blocks):
            if block and not filled[group] and not self.allocators[group].shared(block):
                self.allocators[group].share([block])
                self.counts[group] += 1
                filled[group] = block
        node.blocks = tuple(filled)

    def count_evictable(self, node: Node, change: int) -> None:
        """The node lost its last pin (1), or got one (-1)."""
        for group, block in enumerate(node.blocks):
            if block:
                self.evictable[group] += change

    def evict(self, node: Node) -> None:
        """Gives back the blocks of a node without pins."""
        self.count_evictable(node, -1)
        for group, block in enumerate(node.blocks):
            self.counts[group] -= bool(block)
        self.release(node)

    def release(self, node: Node) -> None:
        """Gives back the blocks of a node, which are not counted any more."""
        for allocator, block in zip(self.allocators, node.blocks, strict=False):
            allocator.release([block])

    def check(self, nodes: Sequence[Node]) -> None:
        """Asserts the counts against all `nodes`, and that who holds a block of one pins it."""
        for group, allocator in enumerate(self.allocators):
            kept = [node.blocks[group] for node in nodes if node.blocks[group]]
            assert len(kept) == len(set(kept)) == self.counts[group], "a block is kept once, and counted"
            free = sum(1 for node in nodes if not node.pins and node.blocks[group])
            assert free == self.evictable[group], f"{free} evictable blocks are counted as {self.evictable[group]}"
            for node in nodes:
                alone = node.pins or not node.blocks[group] or not allocator.shared(node.blocks[group])
                assert alone, f"block {node.blocks[group]} is held by somebody who does not pin its node"
