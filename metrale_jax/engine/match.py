# SPDX-License-Identifier: Apache-2.0
"""What a `RadixTree` answers with."""

from collections.abc import Sequence
from dataclasses import dataclass

from metrale_jax.engine.lease import first_visible_block
from metrale_jax.engine.leaves import Node


@dataclass(frozen=True)
class Match:
    """A pinned `node`, and a table for each group of the `num_tokens` tokens up to it, each block with a reference.

    Where layers keep recurrent state, `snapshot` is the unit that has it at `num_tokens`, 0 where that is 0; blocks are
    there for the first `num_seen` tokens, of which those after `num_tokens` are of no use without a state.
    """

    node: Node
    tables: list[list[int]]
    num_tokens: int
    num_seen: int
    snapshot: int = 0


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
