# SPDX-License-Identifier: Apache-2.0
"""Paged KV: attention's kind of state. Rolling back is the sequence's length alone, so its commit is the identity."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax.sharding import axes
from pallas_kernels.kv_append.op import kv_append


@dataclass(frozen=True)
class PagedKvSpec:
    """What one attention layer keeps: equal specs share one stacked group and one block table."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    dtype: str


@struct.dataclass
class PagedKv:
    """Keys `[L, P, B, K, H]` and values `[L, P, B, K, Hv]` of a group of layers. Block 0 is for padding."""

    k: Any
    v: Any


AXES = (axes.LAYERS, axes.BLOCKS, axes.BLOCK_TOKENS, axes.KV_HEADS, axes.HEAD_DIM)


def abstract(spec: PagedKvSpec, num_layers: int, num_blocks: int, block_size: int) -> PagedKv:
    """Shapes and dtypes of a group's storage."""
    shape = (num_layers, num_blocks, block_size, spec.num_kv_heads)
    return PagedKv(
        k=jax.ShapeDtypeStruct((*shape, spec.head_dim), jnp.dtype(spec.dtype)),
        v=jax.ShapeDtypeStruct((*shape, spec.v_head_dim), jnp.dtype(spec.dtype)),
    )


def append(kv: PagedKv, layer, slots, keys, values) -> PagedKv:
    """The storage with the step's keys `[T, K, H]` and values `[T, K, Hv]` written to `slots` of `layer`."""
    return PagedKv(k=kv_append(kv.k, layer, slots, keys), v=kv_append(kv.v, layer, slots, values))


def copy_blocks(kv: PagedKv, source, target) -> PagedKv:
    """The storage with blocks `target [n]` overwritten by blocks `source [n]`, in every layer."""
    return jax.tree.map(lambda x: x.at[:, target].set(x[:, source], mode="promise_in_bounds"), kv)


def bytes_per_block(spec: PagedKvSpec, num_layers: int, block_size: int) -> int:
    """What one block of a group costs."""
    width = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    return num_layers * block_size * width * jnp.dtype(spec.dtype).itemsize
