# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a TPU, as a Pallas-Mosaic kernel: query rows laid out in groups, one grid step a row.

Rows of sequences and pieces of chunks are the same to the kernel (see `mosaic_tpu_kernel`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.mosaic_tpu_kernel import LOG2E, body
from pallas_kernels.paged_attention.mosaic_tpu_sizes import Tiling, tiling_for, vmem_bytes, work_dtype
from pallas_kernels.paged_attention.mosaic_tpu_tiles import Arrays, Call, Numbers, scratch_of
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows, cut_pieces
from pallas_kernels.shapes import ceil_div

# The compiler's own stack beside the buffers that the kernel names: logits and weights of a head, relayouts of a tile.
VMEM_SLACK = 12 << 20
# Rows of either have no instruction of a TPU that would load them.
DECLINED = ("float16",)


def supports(dtype: str, kv_format: str, **facts) -> str:
    """Why a TPU's kernel does not serve these sizes, or an empty string."""
    del facts
    for name, value in (("dtype", dtype), ("kv_format", kv_format)):
        if value in DECLINED:
            return f"{name}={value!r} cannot be loaded by a TPU, which loads bfloat16 and float32; use either"
    return ""


def attend(
    q: Float[Array, "S Q N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
    interpret: Any = False,
) -> Float[Array, "S Q N Hv"]:
    """See `op.decode_attention`. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    num_rows, query_len, num_heads, _ = q.shape
    tiling = tiling_for(q, pages, params.latent)
    if tiling.query_len < query_len:
        q, rows = _split(q, rows, tiling.query_len)
    out = _call(q, pages, layer, rows, params, sinks, tiling, interpret)
    return out.reshape(num_rows, -1, num_heads, out.shape[-1])[:, :query_len]


def attend_ragged(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
    interpret: Any = False,
) -> Float[Array, "T N Hv"]:
    """See `op.prefill_attention`. The pieces of all chunks (see `cut_pieces`) run as the rows of one `attend`."""
    num_tokens = q.shape[0]
    cut = rows.pieces or cut_pieces(rows, num_tokens)
    offsets = jnp.arange(cut.max_query_len, dtype=jnp.int32)
    used = offsets < cut.query_lens[:, None]
    source = cut.query_starts[:, None] + offsets
    queries = q.at[jnp.where(used, source, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    out = attend(queries, pages, layer, cut, params, sinks, interpret)
    # Each token asks for its row: a gather, where a scatter of rows would run one after another.
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    piece = jnp.sum((token[:, None] >= cut.query_starts) & (cut.query_lens > 0), axis=1, dtype=jnp.int32) - 1
    piece = jnp.maximum(piece, 0)
    offset = token - cut.query_starts[piece]
    inside = (offset >= 0) & (offset < cut.query_lens[piece])
    found = out.at[piece, jnp.where(inside, offset, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(inside[:, None, None], found, 0)


def _split(q, rows, query_len):
    """Rows of at most `query_len` queries, as many for each row of before, each with the past that it sees."""
    num_rows, queries = q.shape[:2]
    parts = ceil_div(queries, query_len)
    q = jnp.pad(q, ((0, 0), (0, parts * query_len - queries), (0, 0), (0, 0)))
    first = jnp.arange(parts, dtype=jnp.int32) * query_len
    lens = jnp.clip(rows.query_lens[:, None] - first, 0, query_len)
    kv_lens = jnp.where(lens > 0, (rows.kv_lens - rows.query_lens)[:, None] + first + lens, 0)
    cut = rows.replace(kv_lens=kv_lens.reshape(-1), query_lens=lens.reshape(-1), max_query_len=query_len)
    return q.reshape(num_rows * parts, query_len, *q.shape[2:]), cut


def _without_lone_head(codes):
    """The pool without the axis of its one head, which a TPU's pool has outside the block's tokens: a view."""
    return codes.reshape(*codes.shape[:3], codes.shape[4]) if codes.shape[3] == 1 else codes


def _call(q, pages, layer, rows, params, sinks, tiling: Tiling, interpret):
    num_rows, query_len, num_heads, _ = q.shape
    v_dim = tiling.v_dim
    parts = num_rows // rows.block_tables.shape[0]
    numbers = _numbers(layer, rows, params, tiling, num_rows)
    arrays = Arrays(
        table=rows.block_tables[:, None],
        next_table=rows.block_tables[:, None],
        tree=() if isinstance(rows.tree, tuple) else rows.tree[:, None],
        sinks=() if isinstance(sinks, tuple) else _sink_rows(sinks, tiling),
        q=_in_groups(q, tiling),
        k=_without_lone_head(pages.k),
        v=() if pages.latent else _without_lone_head(pages.v),
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
    )
    views = not isinstance(interpret, pltpu.InterpretParams)
    call = Call(tiling, params, pages.format, work_dtype(q.dtype, pages), pages.scale_per_row, views)
    specs, out_spec = _specs(arrays, call, parts, v_dim)
    out = pl.pallas_call(
        partial(body, call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(num_rows,),
            in_specs=tuple(specs),
            out_specs=out_spec,
            scratch_shapes=scratch_of(call, pages),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, tiling.num_groups, tiling.rows, v_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_bytes(tiling, q.dtype, pages) + VMEM_SLACK,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
    )(*numbers, *arrays)
    heads = num_heads // tiling.num_groups
    out = out[:, :, : query_len * heads].reshape(num_rows, tiling.num_groups, query_len, heads, v_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(num_rows, query_len, num_heads, v_dim)


def _numbers(layer, rows, params, tiling, num_rows) -> "Numbers":
    """What the kernel knows of every row before it runs."""
    lens = jnp.where(rows.query_lens > 0, rows.kv_lens, 0)
    oldest = jnp.maximum(lens - rows.query_lens - params.window + 1, 0) if params.window else jnp.zeros_like(lens)
    first = jax.lax.div(oldest, tiling.block_size)
    blocks = jnp.where(lens > 0, jax.lax.div(lens + tiling.block_size - 1, tiling.block_size) - first, 0)
    tiles = jax.lax.div(blocks + tiling.tile_blocks - 1, tiling.tile_blocks)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(tiles > 0, index, num_rows), reverse=True)
    return Numbers(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        kv_lens=lens,
        query_lens=rows.query_lens,
        first_block=first,
        tiles_before=jnp.cumsum(tiles) - tiles,
        next_row=jnp.concatenate([following[1:], jnp.full(1, num_rows, jnp.int32)]),
    )


def _in_groups(x, tiling):
    """`[S, Q, N, W]` as the query rows `[S, groups, rows, W]`; rows of padding are zero."""
    num_rows, query_len, _, width = x.shape
    x = x.reshape(num_rows, query_len, tiling.num_groups, -1, width).transpose(0, 2, 1, 3, 4)
    x = x.reshape(num_rows, tiling.num_groups, -1, width)
    return jnp.pad(x, ((0, 0), (0, 0), (0, tiling.rows - x.shape[2]), (0, 0)))


def _sink_rows(sinks, tiling):
    """The sinks of all query rows in base 2, `[groups, rows, 1]`."""
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32) * LOG2E, (1, tiling.query_len, sinks.shape[0]))
    return _in_groups(sinks[..., None], tiling)[0]


def _specs(arrays, call, parts, v_dim):
    """Block specs of the arrays and of the result. Pages stay where they are."""
    tiling = call.tiling
    num_rows = arrays.q.shape[0]

    def of_row(row, *_):
        return row, 0, 0, 0

    def table(row, *_):
        return jax.lax.div(row, parts), 0, 0

    def next_table(row, *numbers):
        return jax.lax.div(jnp.minimum(Numbers(*numbers).next_row[row], num_rows - 1), parts), 0, 0

    def in_smem(array, index_map):
        return pl.BlockSpec((1, *array.shape[1:]), index_map, memory_space=pltpu.SMEM)

    in_place = pl.BlockSpec(memory_space=pl.ANY)
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)

    def scale(array):
        return () if isinstance(array, tuple) else in_place if call.scale_per_row else whole

    specs = Arrays(
        table=in_smem(arrays.table, table),
        next_table=in_smem(arrays.next_table, next_table),
        tree=() if isinstance(arrays.tree, tuple) else in_smem(arrays.tree, lambda row, *_: (row, 0, 0)),
        sinks=() if isinstance(arrays.sinks, tuple) else pl.BlockSpec(arrays.sinks.shape, lambda *_: (0, 0, 0)),
        q=pl.BlockSpec((1, *arrays.q.shape[1:]), of_row),
        k=in_place,
        v=() if call.params.latent else in_place,
        k_scale=scale(arrays.k_scale),
        v_scale=scale(arrays.v_scale),
    )
    return specs, pl.BlockSpec((1, tiling.num_groups, tiling.rows, v_dim), of_row)


INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
attend_interpreted = partial(attend, interpret=INTERPRET)
attend_ragged_interpreted = partial(attend_ragged, interpret=INTERPRET)
