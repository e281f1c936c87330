# SPDX-License-Identifier: Apache-2.0
"""The kernels that are compiled for machines that are not here, and what their figures have to keep to.

One list for all platforms: a backend adds its rows in `ROWS`, and `figures.py` has a reader for its platform.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.static import layer_rows
from benchmarks.static.row import LAYER, LAYERS, Row, placed
from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.pages import KvPages, abstract_pages
from pallas_kernels.paged_attention.cases import HEAD_DIMS
from pallas_kernels.paged_attention.op import (
    AttentionParams,
    SequenceRows,
    cut_pieces,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.shapes import ceil_div, next_power_of_two


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a compiled call; `query_len` counts the tokens of a row, or of the whole step in prefill."""

    head_dim: int
    v_head_dim: int
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    num_blocks: int = 16384
    num_sequences: int = 64
    table_width: int = 256
    query_len: int = 1
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    scale_per_head: bool = False
    latent: bool = False

    @property
    def words(self) -> list[str]:
        """Name the sizes, those that are not the usual ones included."""
        usual = Sizes(0, 0, query_len=self.query_len)
        odd = [
            f"{field.replace('_', '-')}={value}"
            for field, value in vars(self).items()
            if value != getattr(usual, field) and field not in ("head_dim", "v_head_dim", "num_blocks")
        ]
        widths = f"H{self.head_dim}" + ("" if self.v_head_dim == self.head_dim else f"-Hv{self.v_head_dim}")
        return [widths, f"Q{self.query_len}", *odd]


def arguments(row: Row, sharding: Any) -> tuple[Callable, tuple]:
    """The call of a row and the shapes of its arguments, on the device that `sharding` names."""
    return ENTRIES[row.entry](row, sharding)


def abstract_storage(row: Row) -> KvPages:
    """Shapes of the row's pages."""
    sizes = row.sizes
    shape = (LAYERS, sizes.num_blocks, sizes.block_size, sizes.num_kv_heads)
    pages = abstract_pages(row.kv_format, shape, sizes.head_dim, 0 if sizes.latent else sizes.v_head_dim)
    if not sizes.scale_per_head:
        return pages
    scale = jax.ShapeDtypeStruct((LAYERS, sizes.num_kv_heads), jnp.float32)
    return pages.replace(k_scale=scale, v_scale=scale)


def _attention_arguments(row: Row, sharding: Any, num_sequences: int, q_shape: tuple, max_query_len: int):
    sizes = row.sizes

    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    lens = (of(num_sequences) for _ in range(3))
    tree = of(num_sequences, max_query_len) if sizes.tree else ()
    rows = SequenceRows(of(num_sequences, sizes.table_width), *lens, max_query_len, tree=tree)
    sinks = of(sizes.num_heads, dtype=jnp.float32) if sizes.sinks else ()
    return placed((of(*q_shape, dtype=row.dtype), abstract_storage(row), rows, sinks), sharding)


def _decode(row: Row, sharding: Any):
    sizes = row.sizes
    shape = (sizes.num_sequences, sizes.query_len, sizes.num_heads, sizes.head_dim)
    return _attention(decode_attention, row), _attention_arguments(
        row, sharding, sizes.num_sequences, shape, sizes.query_len
    )


def _prefill(row: Row, sharding: Any):
    sizes = row.sizes
    shape = (sizes.query_len, sizes.num_heads, sizes.head_dim)
    q, pages, rows, sinks = _attention_arguments(row, sharding, sizes.num_sequences, shape, sizes.query_len)
    # A step cuts its chunks once for all layers.
    pieces = jax.eval_shape(partial(cut_pieces, num_tokens=sizes.query_len), rows)
    return _attention(prefill_attention, row), (q, pages, rows.replace(pieces=placed(pieces, sharding)), sinks)


def _attention(entry: Callable, row: Row) -> Callable:
    latent = row.sizes.v_head_dim if row.sizes.latent else 0
    params = AttentionParams(row.sizes.head_dim**-0.5, row.sizes.window, row.sizes.softcap, latent)

    def call(q, pages, rows, sinks):
        return entry(q, pages, LAYER, rows, params, row.platform, sinks, row.impl)

    return call


def _append(row: Row, sharding: Any):
    sizes = row.sizes

    def rows_of(width):
        return jax.ShapeDtypeStruct((sizes.query_len, sizes.num_kv_heads, width), jnp.dtype(row.dtype))

    slots = jax.ShapeDtypeStruct((sizes.query_len,), jnp.int32)
    new = rows_of(sizes.head_dim), rows_of(0 if sizes.latent else sizes.v_head_dim)

    def call(pages, slots, keys, values):
        return kv_append(pages, LAYER, slots, keys, values, row.platform, row.impl)

    return call, placed((abstract_storage(row), slots, *new), sharding)


def donated(row: Row) -> tuple[int, ...]:
    """Which arguments a call may write over: an append's pages, and states."""
    return (0,) if row.entry in ("append", *layer_rows.WRITING) else ()


ENTRIES: Mapping[str, Callable] = MappingProxyType(
    {"decode": _decode, "prefill": _prefill, "append": _append, **layer_rows.ENTRIES}
)


# What a model's numbers and its pages are made of; float32 pages are a CPU's, and are served for comparison's sake.
COMMON_FORMATS = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "fp8_e4m3"),
    ("bfloat16", "fp8_e5m2"),
    ("bfloat16", "int8"),
    ("float16", "float16"),
    ("float16", "fp8_e4m3"),
    ("float32", "float32"),
    ("bfloat16", "float16"),
)
USUAL = ("bfloat16", "bfloat16")


def _cuda_sizes(*widths: int, **more: Any) -> Sizes:
    """Sizes whose pool is as large as a real machine's: of so many numbers that offsets take more than 32 bits."""
    sizes = Sizes(*widths, **more)
    in_a_block = LAYERS * sizes.block_size * sizes.num_kv_heads * min(sizes.head_dim, sizes.v_head_dim)
    return replace(sizes, num_blocks=next_power_of_two(ceil_div((1 << 32) + 1, in_a_block)))


# A past beyond the first split is shared by programs, and a second kernel weighs the splits together.
SPLIT = MappingProxyType({"min_blocks": 2, "max_kernels": 2})


def _cuda_rows() -> Iterator[Row]:
    """Every format at every head width, and what else changes a kernel's code at the usual width."""
    for widths in HEAD_DIMS:
        for dtype, kv_format in COMMON_FORMATS:
            quick = (dtype, kv_format) == USUAL or widths == (128, 128)
            decode = Row("decode", "triton", "cuda", dtype, kv_format, _cuda_sizes(*widths), quick, **SPLIT)
            yield decode
            prefill = _cuda_sizes(*widths, num_sequences=4, query_len=2048)
            # The other kernel fills the step with zeros.
            yield Row("prefill", "triton", "cuda", dtype, kv_format, prefill, quick, max_kernels=2)
    for more in (
        {"num_heads": 64, "query_len": 4},
        {"query_len": 16, "tree": True},
        {"window": 1024, "softcap": 30.0, "sinks": True},
        {"block_size": 256, "table_width": 16},
        {"num_heads": 9, "num_kv_heads": 3},
        {"num_sequences": 1, "table_width": 2048},
    ):
        yield Row("decode", "triton", "cuda", *USUAL, _cuda_sizes(128, 128, **more), True, **SPLIT)
    short = _cuda_sizes(128, 128, table_width=32)
    yield Row("decode", "triton", "cuda", *USUAL, short, True, min_blocks=2)
    per_head = _cuda_sizes(128, 128, scale_per_head=True)
    yield Row("decode", "triton", "cuda", "bfloat16", "int8", per_head, True, **SPLIT)
    for dtype, kv_format in COMMON_FORMATS:
        for widths in ((128, 128), (80, 80)):
            sizes = _cuda_sizes(*widths, query_len=64)
            yield Row("append", "triton", "cuda", dtype, kv_format, sizes, widths[0] == 128, tensor_cores=False)
    yield from _cuda_latents()
    for widths in ((64, 64), (128, 128), (192, 128)):
        for more in ({}, {"window": 1024, "softcap": 30.0, "sinks": True}):
            sizes = _cuda_sizes(*widths, num_sequences=4, query_len=2048, **more)
            yield Row("prefill", "mosaic_gpu", "cuda", *USUAL, sizes, widths[0] == 128, targets=("h200",))


# Keys of Kimi Linear's latent attention, of which values are a part.
LATENT = MappingProxyType({"head_dim": 576, "v_head_dim": 512, "num_kv_heads": 1, "latent": True})
# What splits leave is as wide as the latents, for each of all heads.
LATENT_LIMITS = MappingProxyType({"max_kernels": 2, "most_bytes": 1.12})


def _cuda_latents() -> Iterator[Row]:
    """Latents in every format, for all of a model's heads and for those of one of several devices."""
    for dtype, kv_format in COMMON_FORMATS:
        usual = (dtype, kv_format) == USUAL
        room = 2 if kv_format in ("bfloat16", "float16") else 1
        sizes = _cuda_sizes(**LATENT)
        yield Row("decode", "triton", "cuda", dtype, kv_format, sizes, usual, min_blocks=room, **LATENT_LIMITS)
        sizes = _cuda_sizes(**LATENT, num_sequences=4, query_len=2048)
        yield Row("prefill", "triton", "cuda", dtype, kv_format, sizes, usual, max_kernels=2)
    for more in ({"num_heads": 8}, {"num_heads": 128}, {"query_len": 4}, {"query_len": 8, "tree": True}):
        sizes = _cuda_sizes(**LATENT, **more)
        yield Row("decode", "triton", "cuda", *USUAL, sizes, min_blocks=2, **LATENT_LIMITS)
    for kv_format in ("bfloat16", "int8"):
        sizes = _cuda_sizes(**LATENT, query_len=64)
        yield Row("append", "triton", "cuda", "bfloat16", kv_format, sizes, kv_format == "int8", tensor_cores=False)


# What a TPU loads; the widths of heads that a model's chips have between them, one head each included.
TPU_FORMATS = tuple(pair for pair in COMMON_FORMATS if "float16" not in pair)
TPU_HEADS = ((32, 4), (16, 2), (8, 1), (9, 3), (16, 16), (64, 8))


def _tpu_rows() -> Iterator[Row]:
    """Every head width, every format at the usual one, and what else changes a kernel's code."""
    for widths in HEAD_DIMS:
        usual = widths == (128, 128)
        for dtype, kv_format in TPU_FORMATS:
            prefill = Sizes(*widths, num_sequences=4, query_len=2048)
            if usual or kv_format in ("bfloat16", "int8"):
                yield Row("decode", "mosaic_tpu", "tpu", dtype, kv_format, Sizes(*widths), usual)
            if usual or kv_format == "bfloat16":
                yield Row("prefill", "mosaic_tpu", "tpu", dtype, kv_format, prefill, usual)
    for heads, kv_heads in TPU_HEADS:
        for kv_format in ("bfloat16", "int8"):
            sizes = Sizes(128, 128, num_heads=heads, num_kv_heads=kv_heads)
            yield Row("decode", "mosaic_tpu", "tpu", "bfloat16", kv_format, sizes, kv_heads == 1)
    for more in (
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "v_head_dim": 64},
        {"query_len": 4},
        {"num_heads": 64, "query_len": 4},
        {"query_len": 16, "tree": True, "window": 1024, "softcap": 30.0, "sinks": True},
        *(
            {"block_size": size, "table_width": 4096 // size, "num_blocks": 2**18 // size}
            for size in (32, 64, 128, 256)
        ),
        {"num_sequences": 256, "table_width": 2048},
    ):
        yield Row("decode", "mosaic_tpu", "tpu", *USUAL, Sizes(**{"head_dim": 128, "v_head_dim": 128, **more}), True)
    yield Row("decode", "mosaic_tpu", "tpu", "bfloat16", "int8", Sizes(128, 128, scale_per_head=True), True)
    int8_blocks = Sizes(128, 128, block_size=128, table_width=32, num_blocks=2048)
    yield Row("decode", "mosaic_tpu", "tpu", "bfloat16", "int8", int8_blocks, True)
    yield from _tpu_latents()
    for kv_format in ("bfloat16", "int8"):
        for heads in (8, 3, 1):
            for tokens in (64, 2048):
                sizes = Sizes(128, 128, num_kv_heads=heads, query_len=tokens)
                yield _tpu_append(sizes, kv_format)


def _tpu_latents() -> Iterator[Row]:
    """Latents as they lie, decoded and in float32, for all heads and for those of one of several devices."""
    for dtype, kv_format in (USUAL, ("bfloat16", "int8"), ("float32", "float32")):
        usual = kv_format == "bfloat16"
        yield Row("decode", "mosaic_tpu", "tpu", dtype, kv_format, Sizes(**LATENT), usual)
        sizes = Sizes(**LATENT, num_sequences=4, query_len=2048)
        # The queries of all heads, laid out, are more than the scales of one.
        if kv_format != "int8":
            yield Row("prefill", "mosaic_tpu", "tpu", dtype, kv_format, sizes, usual)
    for more in ({"num_heads": 8}, {"num_heads": 128}, {"query_len": 4}):
        yield Row("decode", "mosaic_tpu", "tpu", *USUAL, Sizes(**LATENT, **more))
    for kv_format in ("bfloat16", "int8"):
        yield _tpu_append(Sizes(**LATENT, query_len=64), kv_format)


def _tpu_append(sizes: Sizes, kv_format: str) -> Row:
    if sizes.num_kv_heads > 1:
        quick = sizes.num_kv_heads == 8
        return Row("append", "mosaic_tpu", "tpu", "bfloat16", kv_format, sizes, quick, tensor_cores=False)
    # On v7x XLA copies the scales of one head: a thirty-second of the codes, but as large as an array of the pool.
    targets = ("v5e", "v6e") if kv_format == "int8" else ()
    return Row("append", "xla", "tpu", "bfloat16", kv_format, sizes, targets=targets, tensor_cores=False)


ROWS: tuple[Row, ...] = (*_cuda_rows(), *_tpu_rows(), *layer_rows.ROWS)


def rows_of(target: str, platform: str) -> list[Row]:
    """The rows that are compiled for a target."""
    return [row for row in ROWS if row.platform == platform and (not row.targets or target in row.targets)]
