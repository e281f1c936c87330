# SPDX-License-Identifier: Apache-2.0
"""What a `RadixTree` answers with."""

from collections.abc import Sequence
from dataclasses import dataclass

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import first_visible_block
from metrale_jax.engine.leaves import Node


@dataclass(frozen=True)
class Match:
    """A pinned `node`, and a table for each group of the `num_tokens` tokens up to it, each block with a reference.

    Where layers keep recurrent state, `snapshot` is the unit that has it at `num_tokens`, 0 where that is 0; blocks are
    there for the first `num_seen` tokens, of which those after `num_tokens` are of no use without a state.

    With an `ending` all tokens matched, and nothing need be run to draw the next: the row that it is drawn from is kept
    with the snapshot. The ending is `node` or a tail below it, whose block is to be copied; it is pinned too.
    """

    node: Node
    tables: list[list[int]]
    num_tokens: int
    num_seen: int
    snapshot: int = 0
    ending: Node | None = None


@dataclass(frozen=True)
class RadixStats:
    """Nodes now, blocks kept now in each group, and counts since the beginning, which `clear` leaves alone."""

    num_nodes: int
    num_blocks: tuple[int, ...]
    query_tokens: int
    hit_tokens: int
    evicted_nodes: int


def usable_depth(path: Sequence[Node], windows: Sequence[int], block_size: int, stateless: bool) -> int:
    """The most nodes of `path` after which the next token finds all that it sees in every group, and a snapshot unless
    `stateless`."""
    whole_from = [0] * len(windows)
    usable = 0
    for index, node in enumerate(path, start=1):
        if 0 in node.blocks:
            for group, block in enumerate(node.blocks):
                whole_from[group] = whole_from[group] if block else index
        if (stateless or node.snapshot) and all(
            start <= first_visible_block(index * block_size, window, block_size)
            for start, window in zip(whole_from, windows, strict=True)
        ):
            usable = index
    return usable


def walked(root: Node, tokens: tuple[int, ...], block_size: int) -> list[Node]:
    """The nodes below `root` of as many whole blocks of `tokens` as there are."""
    node, path = root, []
    for start in range(0, len(tokens), block_size):
        node = node.children.get(tokens[start : start + block_size])
        if node is None:
            break
        path.append(node)
    return path


def ending_of(path: Sequence[Node], tokens: Sequence[int], windows: Sequence[int], block_size: int) -> Node | None:
    """The node with the row after all `tokens`, from whose start `path` leads, a root where it leads nowhere; None if
    there is none, or a token there would not find all the whole blocks that it sees."""
    last, whole = path[-1], path[-1].depth * block_size
    if len(tokens) - whole >= block_size:
        return None
    for group, window in enumerate(windows):
        first = first_visible_block(len(tokens), window, block_size)
        if last.depth and not all(node.blocks[group] for node in path[first:]):
            return None
    node = last.children.get(tuple(tokens[whole:])) if len(tokens) > whole else last
    return node if node is not None and node.has_row else None


def shared_tables(
    path: Sequence[Node],
    num_tokens: int,
    allocators: Sequence[BlockAllocator],
    windows: Sequence[int],
    block_size: int,
) -> list[list[int]]:
    """A table for each group of the blocks of `path` that a token at `num_tokens` sees, with a reference on each, and
    holes for the others."""
    tables = []
    for group, (allocator, window) in enumerate(zip(allocators, windows, strict=True)):
        first = first_visible_block(num_tokens, window, block_size)
        blocks = [node.blocks[group] for node in path[first:]]
        allocator.share(blocks)
        tables.append([0] * min(first, len(path)) + blocks)
    return tables
