# SPDX-License-Identifier: Apache-2.0
"""`RadixTree`: written blocks kept for requests that begin with the same tokens.

One node a block, found by the tokens in it below the node of the block before. The tree has one reference on each
block that it keeps. Whoever holds such a block besides pins its node, and with it the path to the root: a match and an
insertion pin, a fork pins again, and a block that somebody else holds too is not taken in. So a node without a pin
holds its blocks alone, and evicting it frees them all; this is what makes `num_evictable` exact.

What is left of a prompt after its last whole block can have a node too, its tail, in a block that nobody else writes
to. It is never on the way to another node, and of use only as long as a state is kept at its end.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.kept import KeptBlocks
from metrale_jax.engine.leaves import LeafQueue, Node
from metrale_jax.engine.match import Match, RadixStats, ending_of, shared_tables, usable_depth, walked
from metrale_jax.engine.snapshots import Snapshots


class RadixTree:
    """A tree for each namespace: anything hashable that says what besides the tokens decides a block's content.

    With `snapshots` a prefix can be used only where one has been taken.
    """

    def __init__(
        self,
        allocators: tuple[BlockAllocator, ...],
        windows: tuple[int, ...],
        block_size: int,
        snapshots: Snapshots | None = None,
    ):
        assert len(allocators) == len(windows) > 0, f"{len(allocators)} allocators and {len(windows)} windows"
        self.block_size, self.snapshots = block_size, snapshots
        self.on_evict: Callable[[list[Node]], None] = lambda nodes: None
        self._allocators, self._windows, self._may_lack = allocators, windows, any(windows)
        if snapshots is not None:
            snapshots.on_loss = self._lose_tail
        self._roots: dict[Hashable, Node] = {}
        self._leaves = LeafQueue(block_size)
        self._generation = self._num_nodes = 0
        self._query_tokens = self._hit_tokens = self._evicted_nodes = 0
        self._kept = KeptBlocks(allocators)

    @property
    def num_evictable(self) -> tuple[int, ...]:
        """Blocks of each group that `evict` could free now; exact."""
        return tuple(self._kept.evictable)

    @property
    def stats(self) -> RadixStats:
        """What the tree holds and what it was asked for."""
        counts = self._query_tokens, self._hit_tokens, self._evicted_nodes
        return RadixStats(self._num_nodes, tuple(self._kept.counts), *counts)

    def kept(self) -> list[Node]:
        """Every node but the roots."""
        return [node for node in self._nodes() if node.parent is not None]

    def knows(self, node: Node) -> bool:
        """Whether `node` is of this tree as it is now."""
        return node.generation == self._generation

    def match(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        max_tokens: int,
        reach: Callable[[list[Node], int], int] | None = None,
        whole: bool = False,
    ) -> Match:
        """The longest prefix of whole blocks, at most `max_tokens`, from which every group can go on; pinned.

        Blocks that the next token's window has left behind come back as 0, without a reference. The caller gives back
        the others, and the pin with `release`, also where nothing was found: the node is the namespace's root then.

        `reach(path, usable)` may say that more of the `path` than its first `usable` nodes is of use. With `whole`, all
        tokens match where the row after them is kept: the node that has it is the match's `ending`, pinned besides.
        """
        size = self.block_size
        limit = max(0, min(len(tokens), max_tokens))
        root = self._roots.get(namespace) or self._new_root(namespace)
        path = walked(root, tuple(tokens[: (len(tokens) if whole else limit) // size * size]), size)
        ending = ending_of(path or [root], tokens, self._windows, size) if whole else None
        if ending is not None:
            self._pin_path(ending)
            return replace(self._found(path or [root], len(tokens), ending), ending=ending)
        del path[limit // size :]
        if self._may_lack and any(0 in node.blocks for node in path):
            del path[usable_depth(path, self._windows, size, stateless=True) :]
        num_seen = len(path) * size
        usable = len(path) if self.snapshots is None else usable_depth(path, self._windows, size, stateless=False)
        del path[usable if reach is None else min(len(path), reach(path, usable)) :]
        state = path[-1] if self.snapshots is not None and 0 < len(path) <= usable else None
        self._query_tokens += limit - len(path) * size
        return replace(self._found(path or [root], len(path) * size, state), num_seen=num_seen)

    def _found(self, path: list[Node], num_tokens: int, state: Node | None) -> Match:
        """Pins the path, or the root that stands for an empty one; `state` has the snapshot that is gone on from."""
        node = path[-1]
        self._pin_path(node)
        self._query_tokens += num_tokens
        self._hit_tokens += num_tokens
        tables = shared_tables(path[: node.depth], num_tokens, self._allocators, self._windows, self.block_size)
        snapshot = self.snapshots.use(state) if state is not None else 0
        return Match(node, tables, num_tokens, num_tokens, snapshot)

    def insert(self, node: Node, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> Node:
        """The deepest node after extending pinned `node` by whole written blocks; the pin moves there.

        `tables` has for each group the blocks of just these `tokens`. Where an equal node is there already, it stays as
        it is and the caller's block remains the caller's alone until `share`, unless it fills a hole. A block that
        anybody but the caller holds is not kept: they might not pin it. Insertion ends before it and can be tried
        again later.
        """
        size = self.block_size
        if node.generation != self._generation:
            return node
        assert node.pins, "only a pinned node is extended"
        tokens = tuple(tokens)
        assert all(len(table) * size == len(tokens) for table in tables), "only whole blocks are kept"
        for index, blocks in enumerate(zip(*tables, strict=True)):
            key = tokens[index * size : (index + 1) * size]
            child = node.children.get(key)
            if child is None:
                if any(map(BlockAllocator.shared, self._allocators, blocks)):
                    break
                child = self._add(node, key, blocks)
            else:
                if not child.pins:
                    self._kept.count_evictable(child, -1)
                child.pins += 1
                if 0 in child.blocks:
                    self._kept.fill(child, blocks)
            node = child
        return node

    def share(self, node: Node, depth: int, tables: Sequence[list[int]]) -> bool:
        """Whether a lease's `tables` changed: of the blocks on the path from below `depth` to `node`, which it pins, it
        holds the kept ones instead of its own equal ones, so that nothing is held twice."""
        changed = False
        while node.depth > depth:
            for allocator, table, kept in zip(self._allocators, tables, node.blocks, strict=True):
                own = table[node.depth - 1]
                if kept and own and own != kept:
                    allocator.share([kept])
                    allocator.release([own])
                    table[node.depth - 1] = kept
                    changed = True
            node = node.parent
        return changed

    def pin(self, node: Node) -> None:
        """One pin more on a pinned `node`, for a second holder of its path."""
        assert node.pins, "only what is pinned can be pinned again"
        self._pin_path(node)

    def add_tail(self, node: Node, tokens: Sequence[int], blocks: tuple[int, ...]) -> Node:
        """The new node of fewer `tokens` than a block's below pinned `node`, in `blocks` that the caller gives it."""
        assert 0 < len(tokens) < self.block_size and node.pins, "a tail is shorter than a block, and hangs on a pin"
        tail = self._add(node, tuple(tokens), blocks)
        for allocator, block in zip(self._allocators, blocks, strict=True):
            allocator.release([block])
        tail.pins = 0
        self._let_go(tail)
        return tail

    def release(self, node: Node) -> None:
        """One pin less on `node`. The caller gives its references on blocks back by itself, no later than this."""
        if node.generation != self._generation:
            return
        self._leaves.tick()
        while node is not None:
            assert node.pins, "a pin is released once"
            node.pins -= 1
            if not node.pins:
                self._let_go(node)
            node = node.parent

    def evict(self, wanted: Sequence[int]) -> bool:
        """Whether each allocator now has its `wanted` free blocks, after as few evictions as that takes.

        Where it cannot be reached everything unpinned goes: who would rather keep it adds up `num_evictable` first.
        """
        removed: list[Node] = []
        while any(allocator.num_free < count for allocator, count in zip(self._allocators, wanted, strict=True)):
            leaf = self._leaves.pop()
            if leaf is None:
                break
            removed.append(leaf)
            self._remove(leaf)
        self.on_evict(removed)
        return all(allocator.num_free >= count for allocator, count in zip(self._allocators, wanted, strict=True))

    def clear(self) -> None:
        """Forgets every node, pinned ones too; what is done with an old node afterwards does nothing."""
        if self.snapshots is not None:
            self.snapshots.clear()
        for node in list(self._nodes()):
            node.snapshot, node.has_row = 0, False
            self._kept.release(node)
            node.children.clear()
        self._roots = {}
        self._leaves = LeafQueue(self.block_size)
        self._generation += 1
        self._num_nodes = 0
        self._kept.clear()

    def check(self) -> None:
        """Asserts all that the tree counts, against a walk over it."""
        nodes = self.kept()
        assert len(nodes) == self._num_nodes, f"{len(nodes)} nodes are counted as {self._num_nodes}"
        self._kept.check(nodes)
        self._leaves.check(nodes)
        if self.snapshots is not None:
            self.snapshots.check(nodes)
        for node in self._nodes():
            assert node.generation == self._generation, "a node outlived its generation"
            assert node.pins >= sum(child.pins for child in node.children.values()), "a pin does not reach the root"
            assert node.pins or node.children or node.parent, "an empty root is left"
            for key, child in node.children.items():
                assert child.key == key and child.parent is node and child.depth == node.depth + 1, "a wrong link"
                whole = len(key) == self.block_size
                assert whole or (len(key) < self.block_size and not child.children), "a node is not a whole block"
                for block, window in zip(child.blocks, self._windows, strict=True):
                    assert block or (window and whole), "a hole without a window"

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _new_root(self, namespace: Hashable) -> Node:
        root = self._roots[namespace] = Node(None, namespace, (), self._generation)
        root.pins = 0
        return root

    def _add(self, parent: Node, key: tuple, blocks: tuple[int, ...]) -> Node:
        child = parent.children[key] = Node(parent, key, blocks, self._generation)
        assert all(block or window for block, window in zip(blocks, self._windows, strict=True)), (
            "only a window leaves holes"
        )
        self._kept.take(child)
        self._num_nodes += 1
        self._leaves.tick()
        return child

    def _pin_path(self, node: Node | None) -> None:
        while node is not None:
            if not node.pins:
                self._kept.count_evictable(node, -1)
            node.pins += 1
            node = node.parent

    def _let_go(self, node: Node) -> None:
        """A node without a pin may go, when its turn comes."""
        self._leaves.value(node, self._num_nodes)
        self._kept.count_evictable(node, 1)
        self._settle(node)

    def _lose_tail(self, node: Node) -> None:
        """A tail without a state is of no more use."""
        if len(node.key) < self.block_size and not node.pins:
            self._leaves.discard(node)
            self._remove(node)

    def _settle(self, node: Node) -> None:
        """An unpinned node without children can be evicted, an unpinned root without children is forgotten."""
        if node.pins or node.children:
            return
        if node.parent is None:
            del self._roots[node.key]
        else:
            self._leaves.push(node)

    def _remove(self, leaf: Node) -> None:
        self._kept.evict(leaf)
        if self.snapshots is not None:
            self.snapshots.drop(leaf)
        self._num_nodes -= 1
        self._evicted_nodes += 1
        del leaf.parent.children[leaf.key]
        self._settle(leaf.parent)
