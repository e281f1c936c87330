# SPDX-License-Identifier: Apache-2.0
"""`Pin`: what ties a lease to a `RadixTree`."""

from collections.abc import Sequence

from metrale_jax.engine.lease import AbstractPin
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.radix import RadixTree


class Pin(AbstractPin):
    """A lease's pin, which goes deeper as the blocks that the lease has written are kept."""

    def __init__(self, tree: RadixTree, node: Node):
        self._tree, self._node = tree, node
        self._released = False

    @property
    def num_tokens(self) -> int:
        """Tokens on the pinned path: those of the sequence from here on are not in the tree yet."""
        return self._node.depth * self._tree.block_size

    @property
    def node(self) -> Node:
        """The last node of the pinned path."""
        return self._node

    def node_at(self, num_tokens: int) -> Node | None:
        """The node of the pinned path that ends after `num_tokens`; None where the path is shorter, or forgotten."""
        if num_tokens % self._tree.block_size or num_tokens > self.num_tokens or not self._tree.knows(self._node):
            return None
        node = self._node
        while node.depth * self._tree.block_size > num_tokens:
            node = node.parent
        return node if node.parent is not None else None

    def extend(self, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Keeps the whole blocks of `tokens`, which are written and follow `num_tokens`; `tables` are the lease's.

        To be called before the lease drops what is behind its windows, or that is not kept, and before it forks.
        """
        assert not self._released, "a released pin cannot be extended"
        start, count = self._node.depth, len(tokens) // self._tree.block_size
        blocks = [table[start : start + count] for table in tables]
        self._node = self._tree.insert(self._node, tokens[: count * self._tree.block_size], blocks)

    def share(self, num_tokens: int, tables: Sequence[list[int]]) -> bool:
        """Whether the lease's `tables` changed: blocks that an equal one was kept before, past `num_tokens`, are
        exchanged for it."""
        return self._tree.share(self._node, num_tokens // self._tree.block_size, tables)

    def fork(self) -> "Pin":
        assert not self._released, "a released pin cannot be forked"
        self._tree.pin(self._node)
        return Pin(self._tree, self._node)

    def release(self) -> None:
        assert not self._released, "a pin is released once"
        self._released = True
        self._tree.release(self._node)
