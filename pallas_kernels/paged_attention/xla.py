# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain XLA operations: portable, and the CPU path.

The past is walked in tiles of whole blocks with a running softmax (Milakov and Gimelshein 2018, the recurrence of
FlashAttention), so work follows the longest sequence of the step and not the table's width, and scratch is a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows, cut_pieces, visible
from pallas_kernels.shapes import ceil_div

# Tokens of a sequence's past a tile: enough to amortise the dozen operations of a tile, few enough to waste little on
# short sequences, since a tile is read for all sequences as long as one has tokens in it.
FEW_SEQUENCES, FEW_QUERIES, WIDE_TILE, TILE = 4, 16, 256, 128
# Queries a sequence, over all heads, up to which heads are spread over a block-diagonal matrix (see `_TileReader`).
SPREAD_QUERIES = 16
MASKED = -1e30


def attend(
    q: Float[Array, "S Q N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
) -> Float[Array, "S Q N Hv"]:
    """See `op.decode_attention`."""
    num_sequences, query_len, num_heads, head_dim = q.shape
    block_size, num_kv_heads, v_dim = pages.block_size, pages.num_kv_heads, params.v_dim(pages)
    table_width = rows.block_tables.shape[1]
    tile_blocks = _tile_blocks(num_sequences, query_len, block_size, table_width)
    grouped = q.reshape(num_sequences, query_len, num_kv_heads, -1, head_dim).astype(jnp.float32) * params.scale
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(num_sequences, num_kv_heads, -1, head_dim)
    tile = _TileReader(pages, layer, rows, params, tile_blocks)
    found = tile(grouped, 0) if tile_blocks == table_width else _walk(tile, grouped, v_dim)
    total, weighted = _with_sinks(*found, sinks, query_len)
    out = (weighted / total[..., None]).reshape(num_sequences, num_kv_heads, -1, query_len, v_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_sequences, query_len, num_heads, -1)
    # A used query sees at least its own key; an unused one may have seen anything, its row alone.
    used = jnp.arange(query_len, dtype=jnp.int32) < rows.query_lens[:, None]
    return jnp.where(used[..., None, None], out, 0).astype(q.dtype)


def attend_ragged(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    sinks: Any = (),
) -> Float[Array, "T N Hv"]:
    """See `op.prefill_attention`. All pieces (see `cut_pieces`) run as the rows of one `attend`."""
    num_tokens = q.shape[0]
    cut = rows.pieces or cut_pieces(rows, num_tokens)
    piece = cut.max_query_len
    offsets = jnp.arange(piece, dtype=jnp.int32)
    used = offsets < cut.query_lens[:, None]
    source = cut.query_starts[:, None] + offsets
    out = attend(q.at[jnp.where(used, source, 0)].get(mode="clip"), pages, layer, cut, params, sinks)
    empty = jnp.zeros((num_tokens, *out.shape[2:]), out.dtype)
    target = jnp.where(used, source, num_tokens).reshape(-1)
    return empty.at[target].set(out.reshape(-1, *out.shape[2:]), mode="drop")


def _tile_blocks(num_sequences: int, query_len: int, block_size: int, table_width: int) -> int:
    tokens = WIDE_TILE if num_sequences < FEW_SEQUENCES or query_len > FEW_QUERIES else TILE
    return min(table_width, max(1, tokens // block_size))


def _with_sinks(highest, total, weighted, sinks, query_len):
    """The sums `[S, K, M]` and `[S, K, M, Hv]` with each head's sink counted in, M heads-a-group by queries."""
    if isinstance(sinks, tuple):
        return total, weighted
    sink = jnp.repeat(sinks.astype(jnp.float32).reshape(highest.shape[1], -1), query_len, axis=1)
    new = jnp.maximum(highest, sink)
    old_scale = jnp.exp(highest - new)
    return total * old_scale + jnp.exp(sink - new), weighted * old_scale[..., None]


def _walk(tile, grouped, v_dim):
    rows, params, tile_tokens = tile.rows, tile.params, tile.tile_tokens
    last = jnp.max(rows.kv_lens)
    oldest = jnp.where(rows.kv_lens > 0, rows.kv_lens - rows.query_lens, last)
    begin = jnp.maximum(jnp.min(oldest) - params.window + 1, 0) // tile_tokens if params.window else 0

    def body(index, carry):
        highest, total, weighted = carry
        tile_highest, tile_total, tile_weighted = tile(grouped, index)
        new = jnp.maximum(highest, tile_highest)
        old_scale, tile_scale = jnp.exp(highest - new), jnp.exp(tile_highest - new)
        return (
            new,
            total * old_scale + tile_total * tile_scale,
            weighted * old_scale[..., None] + tile_weighted * tile_scale[..., None],
        )

    shape = grouped.shape[:3]
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, v_dim)))
    return jax.lax.fori_loop(begin, jax.lax.div(last + tile_tokens - 1, tile_tokens), body, start)


class _TileReader:
    """Unnormalised attention over one tile of the past: `(grouped [S,K,M,H], index) -> highest, total, weighted`.

    Few queries are multiplied as one `[K M, K H]` matrix a sequence, zero off the diagonal of kv heads: the pool's rows
    `[K H]` are then used as they lie, where a product for each head would first transpose all the keys and values. The
    wasted products cost less than that as long as reading the past is what takes the time.
    """

    def __init__(self, pages, layer, rows, params, tile_blocks):
        self.pages, self.layer, self.rows, self.params = pages, layer, rows, params
        self.tile_blocks = tile_blocks
        self.tile_tokens = tile_blocks * pages.block_size
        width = rows.block_tables.shape[1]
        pad = ceil_div(width, tile_blocks) * tile_blocks - width
        self.tables = jnp.pad(rows.block_tables, ((0, 0), (0, pad)))

    def _read(self, codes, scales, block_ids):
        """Rows `[S, t, K, H]` of the tile in float32."""
        # No reshape of the pool: XLA's CPU compiler answers one beside a while loop with copies of the pool.
        blocks = codes.at[self.layer, block_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
        rows = blocks.reshape(block_ids.shape[0], -1, *codes.shape[3:])
        rows = self.pages.format.decode(rows, jnp.float32)
        if isinstance(scales, tuple):
            return rows
        if not self.pages.scale_per_row:
            return rows * scales[self.layer][:, None]
        scales = scales.at[self.layer, block_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return rows * scales.swapaxes(2, 3).reshape(rows.shape[:3])[..., None]

    def __call__(self, grouped, index):
        block_ids = self.tables
        if self.tile_blocks < block_ids.shape[1]:
            size = (block_ids.shape[0], self.tile_blocks)
            block_ids = jax.lax.dynamic_slice(
                block_ids, (0, index * self.tile_blocks), size, allow_negative_indices=False
            )
        pages = self.pages
        keys, latent = self._read(pages.k, pages.k_scale, block_ids), self.params.latent
        values = keys[..., :latent] if latent else self._read(pages.v, pages.v_scale, block_ids)
        query_len = self.rows.max_query_len
        key = index * self.tile_tokens + jnp.arange(self.tile_tokens, dtype=jnp.int32)
        seen, needed = visible(key, self.rows, query_len, self.params.window)
        # Unwritten memory may hold NaN: it is replaced, since 0 * NaN would pass it on.
        values = jnp.where(needed[..., None, None], values, 0)
        num_kv_heads, per_head = grouped.shape[1:3]
        logits_of, weighted_of = (_spread_logits, _spread_weighted)
        if num_kv_heads * per_head > SPREAD_QUERIES:
            logits_of, weighted_of = (_head_logits, _head_weighted)
        logits = logits_of(grouped, keys)
        if self.params.softcap:
            logits = self.params.softcap * jnp.tanh(logits / self.params.softcap)
        split = logits.reshape(*logits.shape[:2], per_head // query_len, query_len, -1)
        logits = jnp.where(seen[:, None, None], split, MASKED).reshape(logits.shape)
        highest = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - highest[..., None])
        return highest, jnp.sum(weights, axis=-1), weighted_of(weights, values)


def _head_logits(grouped, keys):
    return jnp.einsum("skmh,skth->skmt", grouped, keys.swapaxes(1, 2))


def _head_weighted(weights, values):
    return jnp.einsum("skmt,skth->skmh", weights, values.swapaxes(1, 2))


def _spread_logits(grouped, keys):
    num_sequences, num_kv_heads, per_head, width = grouped.shape
    diagonal = jnp.eye(num_kv_heads, dtype=grouped.dtype)[:, None, :, None]
    spread = (grouped[:, :, :, None] * diagonal).reshape(num_sequences, -1, num_kv_heads * width)
    logits = jnp.einsum("snc,stc->snt", spread, keys.reshape(num_sequences, -1, num_kv_heads * width))
    return logits.reshape(num_sequences, num_kv_heads, per_head, -1)


def _spread_weighted(weights, values):
    num_sequences, num_kv_heads, per_head, _ = weights.shape
    flat = weights.reshape(num_sequences, num_kv_heads * per_head, -1)
    mixed = jnp.einsum("snt,stc->snc", flat, values.reshape(num_sequences, flat.shape[-1], -1))
    mixed = mixed.reshape(num_sequences, num_kv_heads, per_head, num_kv_heads, -1)
    return jnp.stack([mixed[:, head, :, head] for head in range(num_kv_heads)], axis=1)
