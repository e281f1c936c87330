# SPDX-License-Identifier: Apache-2.0
"""Paged KV: attention's kind of state. Rolling back is the sequence's length alone, so its commit is the identity."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from metrale_jax.sharding import axes
from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.pages import KvPages, abstract_pages
from pallas_kernels.storage import STORAGE, Gap, packed_bytes

# What a group of layers keeps; block 0 is for padding.
PagedKv = KvPages


@dataclass(frozen=True)
class PagedKvSpec:
    """What one attention layer keeps: equal specs share one stacked group and one block table.

    `kv_format` is a name of `pallas_kernels.kv_formats.registry`. Values are part of the keys where `v_head_dim` is 0.
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
    if kv.latent:
        return kv.replace(k=AXES, k_scale=scale)
    return kv.replace(k=AXES, v=AXES, k_scale=scale, v_scale=scale)


def append(kv: PagedKv, layer, slots, keys, values, platform: str) -> PagedKv:
    """The storage with the step's keys `[T, K, H]` and values `[T, K, Hv]` written to `slots` of `layer`."""
    return kv_append(kv, layer, slots, keys, values, platform)


def copy_blocks(kv: PagedKv, source, target) -> PagedKv:
    """The storage with blocks `target [n]` overwritten by blocks `source [n]`, in every layer."""
    return write_blocks(kv, target, read_blocks(kv, source))


def read_blocks(kv: PagedKv, blocks) -> PagedKv:
    """What is in `blocks [n]` of every layer, `[L, n, ...]`; scales that belong to heads are no part of it."""
    return jax.tree.map(lambda x: x[:, blocks], _by_block(kv))


def write_blocks(kv: PagedKv, blocks, content: PagedKv) -> PagedKv:
    """The storage with `blocks [n]` overwritten by what `read_blocks` gave."""
    written = jax.tree.map(lambda x, new: x.at[:, blocks].set(new, mode="promise_in_bounds"), _by_block(kv), content)
    return written if _has_block_scales(kv) else written.replace(k_scale=kv.k_scale, v_scale=kv.v_scale)


def _by_block(kv: PagedKv) -> PagedKv:
    return kv if _has_block_scales(kv) else kv.replace(k_scale=(), v_scale=())


def _has_block_scales(kv: PagedKv) -> bool:
    return isinstance(kv.k_scale, tuple) or kv.scale_per_row


def order_in_memory(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of an array of the pool from the slowest to the fastest, by the shape that one device holds."""
    if len(shape) == 5 and shape[3] == 1:
        # The axis of one head may as well be outside the block's tokens. A TPU pads the last two axes to its tiles, and
        # would pad one head to several.
        return 0, 1, 3, 2, 4
    return tuple(range(len(shape)))


def bytes_per_block(spec: PagedKvSpec, num_layers: int, block_size: int, platform: str, num_shards: int) -> int:
    """What one block of a group takes of the memory of a platform's devices, scales and padding included, on all of
    the `num_shards` that share its heads."""
    return num_shards * _block_bytes(spec, num_layers, block_size, num_shards, STORAGE[platform].num_bytes)


def data_bytes_per_block(spec: PagedKvSpec, num_layers: int, block_size: int) -> int:
    """The same without padding."""
    return _block_bytes(spec, num_layers, block_size, 1, packed_bytes)


def gaps(spec: PagedKvSpec, num_layers: int, block_size: int, platform: str, num_shards: int) -> tuple[Gap, ...]:
    """For each array of a group, the bytes of data that a block has there on one device, and the sizes of the array
    that the platform's kernels cannot address."""
    arrays = _block(spec, num_layers, block_size, num_shards)
    return tuple((packed_bytes(x.shape, x.dtype), STORAGE[platform].unaddressed(x.dtype)) for x in arrays)


def _block_bytes(spec, num_layers, block_size, num_shards, num_bytes: Callable) -> int:
    arrays = _block(spec, num_layers, block_size, num_shards)
    return sum(num_bytes(tuple(x.shape[axis] for axis in order_in_memory(x.shape)), x.dtype) for x in arrays)


def _block(spec, num_layers, block_size, num_shards) -> list[jax.ShapeDtypeStruct]:
    """One block of each array of a group, as one device holds it."""
    local = replace(spec, num_kv_heads=spec.num_kv_heads // num_shards)
    return jax.tree.leaves(abstract(local, num_layers, 1, block_size))
