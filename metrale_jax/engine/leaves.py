# SPDX-License-Identifier: Apache-2.0
"""The nodes of a `RadixTree`, and `LeafQueue`: in which order they are evicted.

Leaves go first, by age against cost. The clock counts releases and new nodes. A node whose last pin goes at time t is
worth `t + num_nodes * past_tokens / DOUBLING_TOKENS`: under steady traffic an unused block lasts about as many ticks as
there are nodes, and one that costs twice as much to compute, for the attention over its past, lasts twice as long.
"""

import heapq
from collections.abc import Hashable, Sequence

# Attention over so many tokens costs about as much as everything else that is done for a token.
DOUBLING_TOKENS = 16384
# The generation of a node that was taken out of its tree by itself.
GONE = -1


class Node:
    """One whole block of tokens, `key`, in a block of each group; 0 is a hole that a window left. A root has no block,
    and a tail fewer tokens.

    `snapshot` is the unit that holds the state of recurrent layers at its end, 0 for none (see `snapshots`); where it
    `has_row`, the unit has the hidden row there too, from which the next token is drawn. `pins` counts the pins of this
    node and of all below it. A node of an older `generation` than its tree's is dead.
    """

    __slots__ = (
        *("blocks", "children", "depth", "generation", "has_row", "key", "parent", "pins", "queued", "snapshot"),
        "worth",
    )

    def __init__(self, parent: "Node | None", key: Hashable, blocks: tuple[int, ...], generation: int):
        self.parent, self.key, self.blocks, self.generation = parent, key, blocks, generation
        self.children: dict[tuple, Node] = {}
        self.depth = parent.depth + 1 if parent else 0
        self.pins = 1
        self.snapshot = 0
        self.has_row = False
        self.worth = 0
        self.queued = False


class LeafQueue:
    """Leaves without pins, least worth first, each at most once. Each operation costs O(log n), spread over many.

    A node that is pinned, given children or used again stays where it is; that is found out when its turn comes.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = self._serial = self._num_gone = 0

    def tick(self) -> None:
        """Time goes on by one."""
        self._clock += 1

    def value(self, node: Node, num_nodes: int) -> None:
        """Sets what `node` is worth, used until now in a tree of `num_nodes`; that never sinks."""
        past_tokens = (node.depth - 1) * self._block_size
        node.worth = max(node.worth, self._clock + num_nodes * past_tokens // DOUBLING_TOKENS)

    def push(self, leaf: Node) -> None:
        """Lets `leaf` be found by `pop`, if it is not already."""
        if not leaf.queued:
            leaf.queued = True
            self._serial += 1
            heapq.heappush(self._heap, (leaf.worth, self._serial, leaf))

    def discard(self, leaf: Node) -> None:
        """`leaf` is no more."""
        leaf.generation = GONE
        self._num_gone += leaf.queued
        if 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].generation != GONE]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def pop(self) -> Node | None:
        """The leaf that is worth least, taken out; None if there is none."""
        while self._heap:
            worth, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.generation == GONE:
                self._num_gone -= 1
                continue
            if node.pins or node.children:
                continue
            if node.worth == worth:
                return node
            self.push(node)
        return None

    def check(self, nodes: Sequence[Node]) -> None:
        """Asserts that of all `nodes` every leaf without pins is here, none twice, and nothing else is."""
        queued = {id(node) for _, _, node in self._heap if node.generation != GONE}
        assert len(queued) == len(self._heap) - self._num_gone, "a node is queued twice"
        assert queued == {id(node) for node in nodes if node.queued}, "a node does not know whether it is queued"
        for node in nodes:
            assert node.pins or node.children or node.queued, "a leaf cannot be evicted"
