# SPDX-License-Identifier: Apache-2.0
"""Paged attention for NVIDIA GPUs, in Pallas over Triton: one kernel for decode, verify and prefill.

A program holds `row_tile` rows of one sequence and one kv head, a row being a query token of one head of the group, so
that all of them share each tile of keys and values that is read. It walks the tokens that its rows see, `key_tile` at a
time, with the running softmax of FlashAttention-2 (Dao 2023); block ids are looked up for each token, so that a tile
spans many small blocks or a part of a large one. Long pasts are cut into `splits`, whose results are weighted together
after (Flash-Decoding), always at the same positions: a sequence's sums have one order whatever runs beside it. Codes
become numbers in registers; scales multiply logits and weights.

Arrays in Triton are powers of two: a head of 96 numbers is read as 64 and 32, so that little is padded.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.kv_formats.registry import format_named
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows, cut_pieces
from pallas_kernels.paged_attention.splits import num_splits, split_tokens_for
from pallas_kernels.paged_attention.triton_program import MASKED, Call, Inputs, Tiling, program
from pallas_kernels.shapes import ceil_div, next_power_of_two
from pallas_kernels.triton_arrays import both, columns, overflow

DTYPES = ("bfloat16", "float16", "float32")
MAX_HEAD_DIM = 256
# Of heads whose values are a part of their keys: a rank of 512 and what is beside it.
MAX_LATENT_DIM = 640
# The side of a matrix instruction: fewer rows are filled up.
LEAST_ROWS = 16


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    dtype, width = facts["dtype"], max(facts["head_dim"], facts["v_head_dim"])
    most = MAX_LATENT_DIM if facts["latent"] else MAX_HEAD_DIM
    if dtype not in DTYPES:
        return f"dtype={dtype} of the queries is none of {DTYPES}, which it multiplies"
    if width > most:
        return f"a head of {width} numbers is above the {most} whose sums fit in registers"
    return overflow(facts["kv_format"], facts["pool_codes"])


def compute_dtype(dtype: jnp.dtype, kv_format: str) -> jnp.dtype:
    """What is multiplied: the queries' dtype if it holds every code, or float32 in the shape of TF32."""
    facts = format_named(kv_format)
    return jnp.dtype(dtype if facts.scaled or facts.dtype == dtype else jnp.float32)


def _key_tile(widest_head: int, code_bytes: int, wide: bool, ragged: bool) -> int:
    """Tokens a tile: as many as leave registers to spare on Hopper and Blackwell."""
    if wide:
        return 16 if ragged else 32
    if not ragged:
        return 64 if widest_head <= 128 else 32
    if code_bytes > 1:
        return 64 if widest_head <= 192 else 32
    return 64 if 64 < widest_head <= 128 else 32


def tiling_for(q: Any, pages: KvPages, rows: SequenceRows, ragged: bool, latent: int = 0) -> Tiling:
    """The tiling of a call for queries `[T, N, H]`. Of `q` and `rows` shapes and dtypes count, as of `pages`.

    Sizes are the largest that leave room for two programs a multiprocessor in decode, whose limit is bytes on their
    way, and for one in prefill, whose limit is arithmetic; in float32, three products in TF32 each, for what spills no
    registers. `benchmarks/static` holds them.
    """
    group_rows = rows.max_query_len * (q.shape[1] // pages.num_kv_heads)
    past = rows.block_tables.shape[1] * pages.block_size
    wide = compute_dtype(q.dtype, pages.kv_format).itemsize > 2
    most_rows = LEAST_ROWS if wide else (128 if ragged else 64)
    row_tile = min(most_rows, max(LEAST_ROWS, next_power_of_two(group_rows)))
    split_tokens = split_tokens_for(group_rows)
    if latent:
        return _latent_tiling(group_rows, past, wide, pages.k.dtype.itemsize, ragged)
    return Tiling(
        row_tile=row_tile,
        key_tile=_key_tile(max(pages.k.shape[-1], pages.v.shape[-1]), pages.k.dtype.itemsize, wide, ragged),
        widest_part=64 if wide else MAX_HEAD_DIM,
        splits=1 if ragged else num_splits(past, split_tokens),
        split_tokens=split_tokens,
        num_warps=8 if row_tile >= 128 else 4,
        num_stages=2 if ragged and wide and pages.k.dtype.itemsize > 2 else 3,
    )


def _latent_tiling(group_rows: int, past: int, wide: bool, code_bytes: int, ragged: bool) -> Tiling:
    """Tiles of latents, each read once for logits and for sums, which are as wide as several heads'.

    More than 32 rows of such sums fit in Hopper's registers, but not in Blackwell's tensor memory beside the logits.
    """
    split_tokens = split_tokens_for(group_rows)
    row_tile = LEAST_ROWS if wide else min(32, max(LEAST_ROWS, next_power_of_two(group_rows)))
    if wide:
        widest, stages = (128 if code_bytes > 2 else MAX_HEAD_DIM, 2) if ragged else (64, 3)
    else:
        widest, stages = MAX_HEAD_DIM, 4 if ragged or code_bytes == 1 else 5
    return Tiling(
        row_tile=row_tile,
        key_tile=16,
        widest_part=widest,
        splits=1 if ragged else num_splits(past, split_tokens),
        split_tokens=split_tokens,
        num_warps=8 if wide or row_tile > LEAST_ROWS else 4,
        num_stages=stages,
    )


def attend(
    q: Float[Array, "S Q N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
    interpret: bool = False,
) -> Float[Array, "S Q N Hv"]:
    """See `op.decode_attention`."""
    num_sequences, query_len, num_heads, head_dim = q.shape
    flat = q.reshape(-1, num_heads, head_dim)
    # Rows that are in order of length run the longest first, so that none is left over at the end.
    ordered = rows.pieces or rows.replace(query_starts=())
    out = _call(flat, pages, layer, ordered, params, sinks, ragged=False, interpret=interpret)
    return out.reshape(num_sequences, query_len, num_heads, -1)


def attend_ragged(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
    interpret: bool = False,
) -> Float[Array, "T N Hv"]:
    """See `op.prefill_attention`."""
    pieces = rows.pieces or cut_pieces(rows, q.shape[0])
    return _call(q, pages, layer, pieces, params, sinks, ragged=True, interpret=interpret)


attend_interpreted = partial(attend, interpret=True)
attend_ragged_interpreted = partial(attend_ragged, interpret=True)


def _call(q, pages, layer, rows, params, sinks, ragged, interpret):
    num_tokens, num_heads, _ = q.shape
    v_dim = params.v_dim(pages)
    tiling = tiling_for(q, pages, rows, ragged, params.latent)
    group = num_heads // pages.num_kv_heads
    row_tiles = ceil_div(rows.max_query_len * group, tiling.row_tile)
    call = Call(
        tiling=tiling,
        params=params,
        group=group,
        query_len=rows.max_query_len,
        row_tiles=row_tiles,
        ragged=ragged,
        kv_format=pages.kv_format,
        compute_dtype=compute_dtype(q.dtype, pages.kv_format),
        v_factor=_v_factor(q.dtype, pages),
        v_dim=v_dim,
        interpret=interpret,
    )
    inputs = Inputs(
        q, pages.k, pages.v, pages.k_scale, pages.v_scale, jnp.asarray(layer, jnp.int32).reshape(1),
        rows.block_tables, rows.kv_lens, rows.query_lens, rows.query_starts, rows.tree, sinks,
    )  # fmt: skip
    splits = () if tiling.splits == 1 else (tiling.splits,)
    out_shape = [jax.ShapeDtypeStruct((*splits, num_tokens, num_heads, v_dim), jnp.float32 if splits else q.dtype)]
    if splits:
        out_shape.append(jax.ShapeDtypeStruct((*splits, num_tokens, num_heads), jnp.float32))
    # Tokens of no sequence are written by no program: a ragged step begins with zeros.
    begin = [jnp.zeros(out_shape[0].shape, q.dtype)] if ragged else []
    out = pl.pallas_call(
        partial(program, call),
        grid=(pages.num_kv_heads * row_tiles, tiling.splits, rows.kv_lens.shape[0]),
        out_shape=out_shape,
        input_output_aliases={len(jax.tree.leaves(inputs)): 0} if ragged else {},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="paged_prefill" if ragged else "paged_decode",
    )(inputs, *begin)
    return _combined(*out, q.dtype, interpret) if splits else out[0]


def _v_factor(dtype: jnp.dtype, pages: KvPages) -> float:
    """What makes a scale about as large as the largest number of its row, which is in the range of any dtype that the
    queries have; the scale itself may be below float16's."""
    largest = pages.format.largest
    return 2.0 ** math.floor(math.log2(largest)) if pages.format.scaled and dtype == jnp.float16 else 1.0


def _combined(out, weight, dtype, interpret):
    """The results of splits `[splits, T, N, Hv]`, each weighted by 2 to the power of `weight [splits, T, N]`."""
    splits, num_tokens, num_heads, v_dim = out.shape
    few = splits <= 16

    def combine(out_ref, weight_ref, combined_ref):
        token, head = pl.program_id(0), pl.program_id(1)
        split = jax.lax.iota(jnp.int32, next_power_of_two(splits))
        inside = split < splits
        weights = plgpu.load(weight_ref.at[split, token, head], mask=inside, other=MASKED)
        share = jnp.exp2(weights - jnp.max(weights))
        share /= jnp.sum(share)
        written = (weights > MASKED)[:, None]
        for cols, within in columns(v_dim, MAX_HEAD_DIM if few else 64):
            part = plgpu.load(
                out_ref.at[split[:, None], token, head, cols[None, :]], mask=both(written, within), other=0.0
            )
            mixed = jnp.sum(part * share[:, None], axis=0).astype(combined_ref.dtype)
            plgpu.store(combined_ref.at[token, head, cols], mixed, mask=cols < v_dim)

    return pl.pallas_call(
        combine,
        grid=(num_tokens, num_heads),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, v_dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1 if few else 4, num_stages=1),
        interpret=interpret,
        name="paged_combine",
    )(out, weight)
