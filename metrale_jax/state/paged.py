# SPDX-License-Identifier: Apache-2.0
"""Paged KV: attention's kind of state. Rolling back is the sequence's length alone, so its commit is the identity."""

from dataclasses import dataclass

import jax

from metrale_jax.sharding import axes
from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.pages import KvPages, abstract_pages

# What a group of layers keeps; block 0 is for padding.
PagedKv = KvPages


@dataclass(frozen=True)
class PagedKvSpec:
    """What one attention layer keeps: equal specs share one stacked group and one block table.

    `kv_format` is a name of `pallas_kernels.kv_formats.registry`.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    kv_format: str


NO_PAGES = PagedKvSpec(1, 1, 1, 0, "float32")
"""The group of a model that keeps nothing by token: it has no layers."""

AXES = (axes.LAYERS, axes.BLOCKS, axes.BLOCK_TOKENS, axes.KV_HEADS, axes.HEAD_DIM)
SCALE_AXES = (axes.LAYERS, axes.BLOCKS, axes.KV_HEADS, axes.BLOCK_TOKENS)


def abstract(spec: PagedKvSpec, num_layers: int, num_blocks: int, block_size: int) -> PagedKv:
    """Shapes and dtypes of a group's storage."""
    shape = (num_layers, num_blocks, block_size, spec.num_kv_heads)
    return abstract_pages(spec.kv_format, shape, spec.head_dim, spec.v_head_dim)


def logical_axes(kv: PagedKv) -> PagedKv:
    """The names of the axes of each array of a group's storage."""
    scale = () if isinstance(kv.k_scale, tuple) else SCALE_AXES
    return kv.replace(k=AXES, v=AXES, k_scale=scale, v_scale=scale)


def append(kv: PagedKv, layer, slots, keys, values, platform: str) -> PagedKv:
    """The storage with the step's keys `[T, K, H]` and values `[T, K, Hv]` written to `slots` of `layer`."""
    return kv_append(kv, layer, slots, keys, values, platform)


def copy_blocks(kv: PagedKv, source, target) -> PagedKv:
    """The storage with blocks `target [n]` overwritten by blocks `source [n]`, in every layer."""
    return jax.tree.map(lambda x: x.at[:, target].set(x[:, source], mode="promise_in_bounds"), kv)


def bytes_per_block(spec: PagedKvSpec, num_layers: int, block_size: int) -> int:
    """What one block of a group costs, scales included."""
    one = jax.tree.leaves(abstract(spec, num_layers, 1, block_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in one)
