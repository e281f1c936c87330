# SPDX-License-Identifier: Apache-2.0
"""Paged attention as a CPU runs it best: a few rows of a step at a time, none walking much further than it sees."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.op import TOGETHER, AttentionParams, SequenceRows, by_length, cut_pieces


def attend(
    q: Float[Array, "S Q N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
) -> Float[Array, "S Q N Hv"]:
    """See `op.decode_attention`. Rows run `TOGETHER` at a time in order of length: what a tile reads is still in cache
    when it is multiplied, short rows do not wait for long ones, and padding is not run at all."""
    query_len = q.shape[1]
    ordered = rows.pieces or by_length(rows)
    if isinstance(ordered, tuple):
        return xla.attend(q, pages, layer, rows, params, sinks)

    def run(index, out):
        # The last rows begin early enough to be as many: those that have run already give the same again.
        def take(leaf):
            start = (index * TOGETHER, *[0] * (leaf.ndim - 1))
            return jax.lax.dynamic_slice(leaf, start, (TOGETHER, *leaf.shape[1:]), allow_negative_indices=False)

        part = jax.tree.map(take, ordered)
        which = jax.lax.div(part.query_starts, jnp.full(TOGETHER, query_len, jnp.int32))
        queries = q.at[which].get(mode="promise_in_bounds", wrap_negative_indices=False)
        found = xla.attend(queries, pages, layer, part, params, sinks)
        return out.at[which].set(found, mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False)

    out = jnp.zeros((*q.shape[:3], params.v_dim(pages)), q.dtype)
    num_used = jnp.sum(rows.kv_lens > 0, dtype=jnp.int32)
    return jax.lax.fori_loop(0, jax.lax.div(num_used + TOGETHER - 1, TOGETHER), run, out)


def attend_ragged(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
) -> Float[Array, "T N Hv"]:
    """See `op.prefill_attention`. Matrix products of one piece fill all cores, so that pieces run one after another:
    none walks further than it sees, and padding is not run at all."""
    num_tokens, num_heads, _ = q.shape
    cut = rows.pieces or cut_pieces(rows, num_tokens)
    piece = cut.max_query_len
    # Room for a whole piece wherever one starts.
    padded = jnp.pad(q, ((0, piece), (0, 0), (0, 0)))

    def run(index, out):
        row = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), cut)
        start = row.query_starts[0]
        part = jax.lax.dynamic_slice_in_dim(padded, start, piece)
        # Past its queries a piece writes zeros, which the next one, starting there, overwrites.
        found = xla.attend(part[None], pages, layer, row, params, sinks)[0]
        return jax.lax.dynamic_update_slice_in_dim(out, found, start, axis=0)

    out = jnp.zeros((num_tokens + piece, num_heads, params.v_dim(pages)), q.dtype)
    return jax.lax.fori_loop(0, jnp.sum(cut.query_lens > 0), run, out)[:num_tokens]
