# SPDX-License-Identifier: Apache-2.0
"""Rows that are sorted by group, cut into tiles of one group each."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class Tiles:
    """The expert, the first row and the row after the last of each of `[X]` tiles, in the order of the rows, all int32;
    `count [1]` of them are real, the others have no rows."""

    expert: Any
    start: Any
    end: Any
    count: Any


def most_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """As many tiles as any sizes of groups can need."""
    return min(num_rows, num_rows // tile + min(num_experts, num_rows))


def cut(group_sizes: Int[Array, " E"], num_rows: int, tile: int) -> Tiles:
    """The tiles, of up to `tile` rows, of groups that have `num_rows` rows together at most."""
    num_experts = group_sizes.shape[0]
    index = jnp.arange(max(1, most_tiles(num_rows, num_experts, tile)), dtype=jnp.int32)
    needed = (group_sizes + tile - 1) // tile
    ends, last = _running_sums(group_sizes), _running_sums(needed)
    expert = jnp.minimum(jnp.sum(last <= index[:, None], axis=1, dtype=jnp.int32), num_experts - 1)
    start = ends[expert] - group_sizes[expert] + (index - last[expert] + needed[expert]) * tile
    real = index < last[-1]
    end = jnp.where(real, jnp.minimum(start + tile, ends[expert]), 0)
    return Tiles(expert, jnp.where(real, start, 0), end, last[-1:])


def _running_sums(counts: Int[Array, " E"]) -> Int[Array, " E"]:
    """The cumulative sums of a few hundred counts, all at once: one program where a scan is several."""
    index = jnp.arange(counts.shape[0])
    return jnp.sum(jnp.where(index <= index[:, None], counts, 0), axis=1)
