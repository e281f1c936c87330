# SPDX-License-Identifier: Apache-2.0
"""The pool: storage of all layer state, one stacked set of arrays for each group of equal specs.

It has one owner: a step takes it donated and the caller rebinds it in the same statement.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from metrale_jax.sharding import axes
from metrale_jax.sharding.rules import partition_spec
from metrale_jax.state.paged import NO_PAGES
from metrale_jax.state.registry import BY_BLOCK, BY_SLOT, OF_STORAGE
from pallas_kernels.storage import STORAGE, Gap


@struct.dataclass
class Pool:
    """Storage in the order of `PoolLayout`: `groups` held by block, `slot_groups` by slot. int32 `positions [U]` says
    how many tokens the state in a slot has taken in; `()` where no layer keeps state in slots. `carry` has by
    name arrays `[U, ...]` of what a proposer knows of the sequence in each slot."""

    groups: tuple
    slot_groups: tuple = ()
    positions: Any = ()
    carry: dict = struct.field(default_factory=dict)


@dataclass(frozen=True)
class CarrySpec:
    """The name of what is carried, and its shape and dtype for one slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str


# The name of what a sequence's tokens by position are carried under.
TOKENS = "tokens"


@dataclass(frozen=True)
class PoolLayout:
    """How layers map to groups: `groups` and `slot_groups` hold the distinct specs, `placement[i]` the (group, index in
    it) of each state of layer i, where slot groups are counted on from the others. The pool is in the memory of a
    `platform`, what is shared out of it among `num_shards` devices. `carried` is what a proposer keeps by slot."""

    groups: tuple[Hashable, ...]
    placement: tuple[tuple[tuple[int, int], ...], ...]
    block_size: int
    platform: str
    num_shards: int
    slot_groups: tuple[Hashable, ...] = ()
    carried: tuple[CarrySpec, ...] = ()

    def num_layers(self, group: int) -> int:
        """Layers of a group."""
        return sum(owner == group for places in self.placement for owner, _ in places)

    def bytes_per_block(self, group: int) -> int:
        """Bytes of one block of a group, over all its layers and devices, as it lies in their memory."""
        spec, layers = self.groups[group], self.num_layers(group)
        kind = BY_BLOCK[type(spec)]
        return kind.bytes_per_block(spec, layers, self.block_size, self.platform, self.num_shards)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every group."""
        return sum(map(self.bytes_per_block, range(len(self.groups))))

    @property
    def block_data_bytes(self) -> int:
        """The same without what memory pads it to."""
        return sum(
            BY_BLOCK[type(spec)].data_bytes_per_block(spec, self.num_layers(group), self.block_size)
            for group, spec in enumerate(self.groups)
        )

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What counts of blocks the platform's kernels cannot address, array by array (see `storage.served_count`)."""
        found = []
        for group, spec in enumerate(self.groups):
            facts = self.num_layers(group), self.block_size, self.platform, self.num_shards
            found += BY_BLOCK[type(spec)].gaps(spec, *facts)
        return tuple(found)

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """The distinct formats of what is held by block."""
        return tuple(dict.fromkeys(spec.kv_format for spec in self.groups))

    @property
    def holds_slots(self) -> bool:
        """Whether anything is held by slot."""
        return bool(self.slot_groups or self.carried)

    @property
    def num_pending(self) -> int:
        """The drafted tokens that every slot can hold until it is known which stand."""
        return min((spec.num_pending for spec in self.slot_groups), default=0)

    @property
    def norm_tokens(self) -> int:
        """After so many tokens of a sequence each a step has to end and `limit_slots` be called; 0 for never."""
        return max((spec.norm_tokens for spec in self.slot_groups), default=0)

    @property
    def max_norms(self) -> tuple[np.float32, ...]:
        """What `limit_slots` goes by, for each group held by slot."""
        return tuple(np.float32(spec.max_norm) for spec in self.slot_groups)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot on one device, over all layers that keep state in slots; 0 where there are none."""
        numbered = enumerate(self.slot_groups, start=len(self.groups))
        slots = [BY_SLOT[type(spec)].abstract(spec, self.num_layers(g), 1) for g, spec in numbered]
        return sum(STORAGE[self.platform].num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(slots))


def make_layout(
    specs: tuple[tuple[Hashable, ...], ...],
    block_size: int,
    platform: str,
    num_shards: int = 1,
    carried: tuple[CarrySpec, ...] = (),
) -> PoolLayout:
    """Equal specs stacked into groups, in order of first appearance; `specs[i]` are those of layer i.

    Where none is held by block there is one group of no layers and no bytes: blocks still count a sequence's tokens.
    """
    flat = [spec for layer in specs for spec in layer]
    by_block = tuple(dict.fromkeys(spec for spec in flat if type(spec) in BY_BLOCK)) or (NO_PAGES,)
    by_slot = tuple(dict.fromkeys(spec for spec in flat if type(spec) in BY_SLOT))
    numbers = {spec: number for number, spec in enumerate((*by_block, *by_slot))}
    counts = [0] * len(numbers)
    placement = []
    for layer in specs:
        places = []
        for spec in layer:
            group = numbers[spec]
            places.append((group, counts[group]))
            counts[group] += 1
        placement.append(tuple(places))
    return PoolLayout(by_block, tuple(placement), block_size, platform, num_shards, by_slot, carried)


def abstract_pool(layout: PoolLayout, num_blocks: tuple[int, ...], num_slots: int = 2) -> Pool:
    """Shapes of a pool with `num_blocks[g]` blocks in group g, block 0 included, and `num_slots` slots, slot 0
    included."""
    blocks = tuple(
        BY_BLOCK[type(spec)].abstract(spec, layout.num_layers(g), num_blocks[g], layout.block_size)
        for g, spec in enumerate(layout.groups)
    )
    slots = tuple(
        BY_SLOT[type(spec)].abstract(spec, layout.num_layers(g), num_slots)
        for g, spec in enumerate(layout.slot_groups, start=len(layout.groups))
    )
    carry = {one.name: jax.ShapeDtypeStruct((num_slots, *one.shape), jnp.dtype(one.dtype)) for one in layout.carried}
    return Pool(blocks, slots, jax.ShapeDtypeStruct((num_slots,), jnp.int32) if slots else (), carry)


def pool_specs(pool: Pool, mesh: Mesh) -> Pool:
    """Where each array of a pool lies on `mesh`: a tree of `PartitionSpec`."""

    def placed(leaf, names):
        return partition_spec(names, leaf.shape, mesh)

    def groups(storages):
        return tuple(jax.tree.map(placed, kv, OF_STORAGE[type(kv)].logical_axes(kv)) for kv in storages)

    def by_slot(leaf):
        return placed(leaf, (axes.SLOTS, *(axes.STATE,) * (leaf.ndim - 1)))

    by_blocks, by_slots = groups(pool.groups), groups(pool.slot_groups)
    return Pool(by_blocks, by_slots, jax.tree.map(by_slot, pool.positions), jax.tree.map(by_slot, pool.carry))


def zeros(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Storage as it starts in production: zeros."""
    return jnp.zeros(spec.shape, spec.dtype)


def make_pool(layout: PoolLayout, num_blocks: tuple[int, ...], fill: Callable = zeros, num_slots: int = 2) -> Pool:
    """A fresh pool; `fill` makes each array (tests pass one that fills with NaN)."""
    return jax.tree.map(fill, abstract_pool(layout, num_blocks, num_slots))


def copy_blocks(pool: Pool, sources, targets) -> Pool:
    """The pool with each group's blocks `targets[g]` overwritten by `sources[g]`: copy on first write after a fork."""
    each = zip(pool.groups, sources, targets, strict=True)
    return pool.replace(groups=tuple(OF_STORAGE[type(kv)].copy_blocks(kv, s, t) for kv, s, t in each))


def read_blocks(pool: Pool, blocks) -> tuple:
    """What is in blocks `blocks[g] [n]` of each group, as `write_blocks` takes it."""
    each = zip(pool.groups, blocks, strict=True)
    return tuple(OF_STORAGE[type(kv)].read_blocks(kv, ids) for kv, ids in each)


def write_blocks(pool: Pool, blocks, content: tuple) -> Pool:
    """The pool with each group's blocks `blocks[g]` overwritten."""
    each = zip(pool.groups, blocks, content, strict=True)
    return pool.replace(groups=tuple(OF_STORAGE[type(kv)].write_blocks(kv, ids, new) for kv, ids, new in each))


def read_slots(pool: Pool, slots) -> tuple:
    """What is in `slots [n]`, as `write_slots` takes it: of each group, their positions, and what is carried."""
    groups = tuple(OF_STORAGE[type(one)].read_slots(one, slots) for one in pool.slot_groups)
    return groups, *jax.tree.map(lambda leaf: leaf[slots], (pool.positions, pool.carry))


def write_slots(pool: Pool, slots, content: tuple) -> Pool:
    """The pool with `slots [n]` overwritten, their positions and what is carried too."""
    groups, *others = content
    each = zip(pool.slot_groups, groups, strict=True)
    written = tuple(OF_STORAGE[type(one)].write_slots(one, slots, new) for one, new in each)

    def put(leaf, new):
        return leaf.at[slots].set(new, mode="promise_in_bounds")

    positions, carry = jax.tree.map(put, (pool.positions, pool.carry), tuple(others))
    return pool.replace(slot_groups=written, positions=positions, carry=carry)


def begin_slots(pool: Pool, slots, tokens, fresh) -> Pool:
    """The pool in whose `slots [n]` sequences begin: nothing is carried there but their known `tokens [n, C]`, by
    position, where those are. Of one that is not `fresh` (bool `[n]`), as it goes on where another one stood, the rest
    stays."""

    def begun(leaf):
        kept = leaf.at[slots].get(mode="clip")
        new = jnp.where(fresh.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.zeros((), leaf.dtype), kept)
        return leaf.at[slots].set(new, mode="promise_in_bounds")

    carry = {name: begun(leaf) for name, leaf in pool.carry.items()}
    if TOKENS in carry:
        carry[TOKENS] = carry[TOKENS].at[slots].set(tokens, mode="promise_in_bounds")
    return pool.replace(carry=carry)


def limit_slots(pool: Pool, slots, max_norms: tuple) -> Pool:
    """The pool with what is in `slots [n]` limited to the norms of `PoolLayout.max_norms`."""
    each = zip(pool.slot_groups, max_norms, strict=True)
    return pool.replace(slot_groups=tuple(OF_STORAGE[type(one)].limit_slots(one, slots, norm) for one, norm in each))


def copy_slots(pool: Pool, source, target) -> Pool:
    """The pool with slots `target [n]` overwritten by slots `source [n]`."""
    return write_slots(pool, target, read_slots(pool, source))
