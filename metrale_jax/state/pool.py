# SPDX-License-Identifier: Apache-2.0
"""The pool: storage of all layer state, one stacked set of arrays for each group of equal specs.

It has one owner: a step takes it donated and the caller rebinds it in the same statement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from metrale_jax.sharding.rules import partition_spec
from metrale_jax.state import paged
from metrale_jax.state.paged import PagedKv, PagedKvSpec


@struct.dataclass
class Pool:
    """Storage groups in the order of `PoolLayout.groups`."""

    groups: tuple[PagedKv, ...]


@dataclass(frozen=True)
class PoolLayout:
    """How layers map to groups: `groups` holds the distinct specs, `placement[i]` is layer i's (group, index in it)."""

    groups: tuple[PagedKvSpec, ...]
    placement: tuple[tuple[int, int], ...]
    block_size: int

    def num_layers(self, group: int) -> int:
        """Layers of a group."""
        return sum(1 for owner, _ in self.placement if owner == group)

    def bytes_per_block(self, group: int) -> int:
        """Bytes of one block of a group, over all its layers."""
        return paged.bytes_per_block(self.groups[group], self.num_layers(group), self.block_size)


def make_layout(specs: tuple[PagedKvSpec, ...], block_size: int) -> PoolLayout:
    """Equal specs stacked into groups, in order of first appearance."""
    groups: list[PagedKvSpec] = []
    counts: list[int] = []
    placement = []
    for spec in specs:
        if spec not in groups:
            groups.append(spec)
            counts.append(0)
        group = groups.index(spec)
        placement.append((group, counts[group]))
        counts[group] += 1
    return PoolLayout(tuple(groups), tuple(placement), block_size)


def abstract_pool(layout: PoolLayout, num_blocks: tuple[int, ...]) -> Pool:
    """Shapes of a pool with `num_blocks[g]` blocks in group g, block 0 included."""
    return Pool(
        tuple(
            paged.abstract(spec, layout.num_layers(g), num_blocks[g], layout.block_size)
            for g, spec in enumerate(layout.groups)
        )
    )


def pool_specs(pool: Pool, mesh: Mesh) -> Pool:
    """Where each array of a pool lies on `mesh`: a tree of `PartitionSpec`."""

    def placed(leaf, axes):
        return partition_spec(axes, leaf.shape, mesh)

    return Pool(tuple(jax.tree.map(placed, kv, paged.logical_axes(kv)) for kv in pool.groups))


def zeros(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Storage as it starts in production: zeros."""
    return jnp.zeros(spec.shape, spec.dtype)


def make_pool(layout: PoolLayout, num_blocks: tuple[int, ...], fill: Callable = zeros) -> Pool:
    """A fresh pool; `fill` makes each array (tests pass one that fills with NaN)."""
    return jax.tree.map(fill, abstract_pool(layout, num_blocks))


def copy_blocks(pool: Pool, sources, targets) -> Pool:
    """The pool with each group's blocks `targets[g]` overwritten by `sources[g]`: copy on first write after a fork."""
    return Pool(tuple(paged.copy_blocks(kv, s, t) for kv, s, t in zip(pool.groups, sources, targets, strict=True)))
