# SPDX-License-Identifier: Apache-2.0
"""What a pool's blocks and slots hold, as arrays on the host: cut, joined, and made trees of again."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# Blocks of each group that are copied to the host or back by one call.
PART = 16


def side_by_side(whole: jax.ShapeDtypeStruct, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of single blocks as one of the shape of `whole`, then zeros. Raises ValueError where they do not fit."""
    out = np.zeros(whole.shape, whole.dtype)
    for index, block in enumerate(blocks):
        if block.dtype != whole.dtype or block.shape != out[:, index : index + 1].shape:
            raise ValueError(f"a block is {block.dtype} {block.shape}, not of {whole.dtype} {whole.shape}")
        out[:, index : index + 1] = block
    return out


def as_tree(shapes: Any, arrays: Sequence[np.ndarray]) -> Any:
    """A tree of `shapes` of the arrays, in order. Raises ValueError where they are not of those shapes."""
    leaves, tree = jax.tree.flatten(shapes)
    wanted, found = ([(leaf.shape, leaf.dtype) for leaf in each] for each in (leaves, arrays))
    if wanted != found:
        raise ValueError(f"its arrays are {found[:2]}..., not {wanted[:2]}...")
    return jax.tree.unflatten(tree, arrays)


def part_of(blocks: Sequence[Sequence[int]], start: int) -> tuple[np.ndarray, ...]:
    """Of each group the ids of up to `PART` blocks, then zeros: the block of padding is read and written."""
    out = tuple(np.zeros((len(blocks), PART), np.int32))
    for row, ids in zip(out, blocks, strict=True):
        part = ids[start : start + PART]
        row[: len(part)] = part
    return out
