# SPDX-License-Identifier: Apache-2.0
"""Prefill attention for Hopper in Pallas over Mosaic GPU: one warpgroup moves pages while two multiply.

The moving warpgroup looks up block ids and has the tensor memory accelerator fetch each page's rows of one kv head into
a ring of tiles in shared memory; the other two hold 64 queries of one head each and take turns at the tensor cores, so
that one's softmax hides behind the other's products (FlashAttention-3, Shah et al. 2024).

It runs by name only. The compilers' figures speak for it where arithmetic is the limit: it spills nothing either, and
its multiplying threads compute no address and wait for no other's softmax. But it is Hopper's alone, which "cuda" is
not; it could be tried in interpretation and by the compiler, not on a GPU, where barriers may still hang; and Triton's
kernel multiplies by `wgmma` too, serves every format and head width, and packs the heads of a group into its tiles, so
that short chunks fill them. `benchmarks/device_kernels.py` times the two against each other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.kv_formats.registry import format_named
from pallas_kernels.paged_attention.mosaic_gpu_program import ROWS, WARPGROUPS, Call, thread_block
from pallas_kernels.paged_attention.op import PIECE, AttentionParams, SequenceRows, cut_pieces

DTYPES = ("bfloat16", "float16")
BLOCK_SIZES = (16, 32, 64, 128, 256)


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    dtype = facts["dtype"]
    if dtype not in DTYPES:
        return f"dtype={dtype} of the queries is none of {DTYPES}, which it multiplies"
    if format_named(facts["kv_format"]).dtype != dtype:
        return f"kv_format={facts['kv_format']} is not {dtype}: tiles are multiplied as they lie in memory"
    if facts["latent"]:
        return "values are a part of the keys, and it would fetch them again"
    for name, limit in (("head_dim", 192), ("v_head_dim", 128)):
        if facts[name] % 64 or facts[name] > limit:
            return f"{name}={facts[name]} is not a multiple of 64 up to {limit}, whose sums fit in registers"
    if facts["block_size"] not in BLOCK_SIZES:
        return f"block_size={facts['block_size']} is none of {BLOCK_SIZES}, which divide its tiles"
    return ""


def attend_ragged(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
    interpret: Any = None,
) -> Float[Array, "T N Hv"]:
    """See `op.prefill_attention`. Pieces come back padded, and are laid end to end again by a gather."""
    num_tokens, num_heads, head_dim = q.shape
    assert ROWS * WARPGROUPS == PIECE, "a thread block is a piece"
    pieces = rows.pieces or cut_pieces(rows, num_tokens)
    num_pieces, v_dim = pieces.kv_lens.shape[0], pages.v.shape[-1]
    key_tile = 128 if max(head_dim, v_dim) <= 128 else 64
    group = num_heads // pages.num_kv_heads
    page_rows = min(pages.block_size, key_tile)
    call = Call(params, group, key_tile, page_rows, (head_dim, v_dim), not isinstance(sinks, tuple), bool(interpret))
    run = plgpu.kernel(
        partial(thread_block, call),
        out_type=jax.ShapeDtypeStruct((num_pieces, PIECE, num_heads, v_dim), q.dtype),
        grid=(num_heads, num_pieces),
        grid_names=("heads", "pieces"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    # Room for a whole piece wherever one starts.
    padded = jnp.pad(q, ((0, PIECE), (0, 0), (0, 0)))
    given = () if isinstance(sinks, tuple) else (sinks.astype(jnp.float32),)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    lens = pieces.block_tables, pieces.kv_lens, pieces.query_lens, pieces.query_starts
    return _end_to_end(run(padded, pages.k, pages.v, layer, *lens, *given), pieces, num_tokens)


def attend_ragged_interpreted(*arguments, **named):
    """`attend_ragged` with warpgroups, barriers and shared memory simulated on the CPU, all but the products, of which
    interpretation knows only some."""
    # JAX 0.10 has these parameters, but no public name for them.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return attend_ragged(*arguments, **named, interpret=InterpretGPUParams())


def _end_to_end(out, pieces: SequenceRows, num_tokens: int):
    """Outputs `[T, N, Hv]` of padded pieces `[pieces, PIECE, N, Hv]`; zero for tokens of no piece."""
    offset = jnp.arange(num_tokens, dtype=jnp.int32) - pieces.query_starts[:, None]
    holds = (offset >= 0) & (offset < pieces.query_lens[:, None])
    owner = jnp.argmax(holds, axis=0)
    found = out.at[owner, jnp.take_along_axis(offset, owner[None], axis=0)[0]].get(mode="clip")
    return jnp.where(jnp.any(holds, axis=0)[:, None, None], found, 0)
