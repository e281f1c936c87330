# SPDX-License-Identifier: Apache-2.0
"""Paged attention of ragged chunks as a CPU runs it best: piece by piece, each over its own past alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows, cut_pieces


def attend_ragged(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "L P B K H"],
    v_pool: Float[Array, "L P B K Hv"],
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
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
        found = xla.attend(part[None], k_pool, v_pool, layer, row, params)[0]
        return jax.lax.dynamic_update_slice_in_dim(out, found, start, axis=0)

    out = jnp.zeros((num_tokens + piece, num_heads, v_pool.shape[-1]), q.dtype)
    return jax.lax.fori_loop(0, jnp.sum(cut.query_lens > 0), run, out)[:num_tokens]
