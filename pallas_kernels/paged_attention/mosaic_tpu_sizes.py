# SPDX-License-Identifier: Apache-2.0
"""How paged attention is cut up on a TPU: sizes from shapes alone, what they take of VMEM, and what is declined."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.shapes import round_up
from pallas_kernels.storage import LANES, SUBLANES, padded_bytes

# Tokens a tile of the past: enough for its copies to hide the latency of memory, few enough for short rows.
TILE_TOKENS = 512
# Bytes of keys and values in flight (two tiles of each), and of a row's queries, outputs and sums.
BUFFER_BYTES, STATE_BYTES = 12 << 20, 24 << 20
# Query rows of all heads up to which they are multiplied together with each kv head's keys, and the rows of other heads
# thrown away: what such a product costs is the loading of the keys.
TOGETHER_ROWS = 128
# Query rows that are multiplied with a tile of latents: all heads share it, whose logits would else fill VMEM.
LATENT_ROWS = 512
# Tokens of a tile that are turned at a time where it goes through memory: what registers hold.
TURNED_TOKENS = 64


@dataclass(frozen=True)
class Tiling:
    """`query_len` queries a row; `tile_blocks` blocks a tile. Query rows come in groups, one for each `span` kv heads:
    queries by the heads of the group, `rows` of them with padding. The span is one head, or all. `strided` says that a
    head's keys can be picked out of a tile by loads of every so many rows, which know 32-bit words and 128 lanes.
    `v_dim` is the width of values."""

    query_len: int
    group: int
    span: int
    rows: int
    num_kv_heads: int
    block_size: int
    tile_blocks: int
    strided: bool
    v_dim: int

    @property
    def tile_tokens(self) -> int:
        """Tokens a tile."""
        return self.tile_blocks * self.block_size

    @property
    def num_groups(self) -> int:
        """Groups of query rows."""
        return self.num_kv_heads // self.span

    @property
    def together(self) -> bool:
        """Whether all heads' rows are one group."""
        return self.num_groups == 1

    @property
    def direct(self) -> bool:
        """Whether heads are used straight from a tile as it lies in the pool."""
        return self.strided and self.together


def tile_shape(tokens: int, heads: int, width: int) -> tuple[int, ...]:
    """How a tile's codes lie: rows of heads, or of tokens where there is one head, which the pool has outside them."""
    return (tokens, width) if heads == 1 else (tokens, heads, width)


def work_dtype(q_dtype, pages: KvPages):
    """What keys and values are decoded to: the queries' dtype, or float32 where the codes hold more."""
    return jnp.dtype(jnp.float32 if pages.k.dtype.itemsize == 4 else q_dtype)


def held(pages: KvPages) -> tuple:
    """The codes that lie in the pool: keys, and values that are no part of them."""
    return (pages.k,) if pages.latent else (pages.k, pages.v)


def tiling_for(q, pages: KvPages, latent: int = 0) -> Tiling:
    """The cut for queries `[S, Q, N, H]`, and values that are so many first numbers of the keys, 0 for others."""
    query_len, num_heads, head_dim = q.shape[1:]
    num_kv_heads, v_dim = pages.num_kv_heads, latent or pages.v.shape[-1]
    shapes = (tile_shape(LANES, num_kv_heads, codes.shape[-1]) for codes in held(pages))
    token = sum(padded_bytes(shape, pages.k.dtype) for shape in shapes) // LANES
    tokens = TILE_TOKENS
    while tokens > LANES and 2 * tokens * token > BUFFER_BYTES:
        tokens //= 2
    query_len = min(query_len, max(1, STATE_BYTES // (num_heads * _state_bytes(1, head_dim, v_dim, q.dtype))))
    if latent:
        query_len = min(query_len, max(1, LATENT_ROWS * num_kv_heads // num_heads))
    span = num_kv_heads if query_len * num_heads <= TOGETHER_ROWS else 1
    group = num_heads // num_kv_heads
    # Rows that lie one after another: no words of padding between the heads of two tokens.
    unpadded = padded_bytes((num_kv_heads, LANES), pages.k.dtype) == num_kv_heads * LANES * pages.k.dtype.itemsize
    return Tiling(
        query_len=query_len,
        group=group,
        span=span,
        rows=round_up(query_len * span * group, SUBLANES * 4 // q.dtype.itemsize),
        num_kv_heads=num_kv_heads,
        block_size=pages.block_size,
        tile_blocks=max(1, tokens // pages.block_size),
        strided=num_kv_heads == 1 or (unpadded and max(head_dim, v_dim) <= LANES),
        v_dim=v_dim,
    )


def _state_bytes(rows, head_dim, v_dim, dtype) -> int:
    """Of one group of query rows: queries and outputs twice, sums and the running softmax's two columns once."""
    widths = round_up(head_dim, LANES) + round_up(v_dim, LANES)
    return rows * (2 * widths * jnp.dtype(dtype).itemsize + 4 * (round_up(v_dim, LANES) + 2 * LANES))


def vmem_bytes(tiling: Tiling, q_dtype, pages: KvPages) -> int:
    """Bytes of VMEM that the kernel's buffers take."""
    tokens, heads = tiling.tile_tokens, tiling.num_kv_heads
    total = tiling.num_groups * _state_bytes(tiling.rows, pages.k.shape[-1], tiling.v_dim, q_dtype)
    for codes in held(pages):
        total += 2 * padded_bytes(tile_shape(tokens, heads, codes.shape[-1]), codes.dtype)
        if not tiling.direct:
            total += padded_bytes((heads, tokens, codes.shape[-1]), jnp.float32)
    if pages.scale_per_row:
        of_one = 2 * padded_bytes((tiling.tile_blocks, heads, tiling.block_size), jnp.float32)
        total += len(held(pages)) * (of_one + padded_bytes((heads, 1, tokens), jnp.float32))
    return total
