# SPDX-License-Identifier: Apache-2.0
"""Bytes of device memory that a call moves, against the least that it could.

For Triton kernels they are counted from what the grid's programs read: each program reads the tokens that its rows
see, masked to the token, and nothing else; programs of one sequence and neighbouring kv heads run side by side, so that
a sector of 32 bytes which two of them touch is fetched once. Sequences are as long as their tables.
"""

import jax
import jax.numpy as jnp

from benchmarks.static.layer_traffic import TRAFFIC
from benchmarks.static.rows import Row, abstract_storage, arguments
from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.splits import split_start
from pallas_kernels.paged_attention.triton import tiling_for
from pallas_kernels.shapes import ceil_div, round_up

SECTOR = 32


def traffic(row: Row) -> dict:
    """`bytes_ratio` and its parts for a decode call, or nothing for others, which arithmetic limits."""
    if row.entry in TRAFFIC:
        return TRAFFIC[row.entry](row)
    if row.entry != "decode":
        return {}
    return decode_traffic(row)


def decode_traffic(row: Row) -> dict:
    """Bytes moved by a decode call of equally long sequences: least, and as the kernel is tiled."""
    sizes, pages = row.sizes, abstract_storage(row)
    seen = sizes.table_width * sizes.block_size
    if sizes.window:
        seen = min(seen, sizes.window + sizes.query_len - 1)
    item = jnp.dtype(row.dtype).itemsize
    queries = sizes.num_sequences * sizes.query_len * sizes.num_heads
    ends = queries * (sizes.head_dim + sizes.v_head_dim) * item
    table = sizes.num_sequences * ceil_div(seen, sizes.block_size) * 4
    least = sizes.num_sequences * _row_bytes(pages, seen, 1) + ends + table
    _, (q, _, rows, _) = arguments(row, None)
    flat = jax.ShapeDtypeStruct((q.shape[0] * q.shape[1], *q.shape[2:]), q.dtype)
    tiling = tiling_for(flat, pages, rows, ragged=False, latent=sizes.v_head_dim if sizes.latent else 0)
    moved = sizes.num_sequences * _row_bytes(pages, seen, SECTOR) + ends + table
    if tiling.splits > 1:
        # Written and read again in float32: the weights of all splits, and the values of those that are seen.
        past = sizes.table_width * sizes.block_size
        met = sum(split_start(index + 1, tiling.split_tokens) > past - seen for index in range(tiling.splits))
        moved += 2 * queries * (tiling.splits + met * sizes.v_head_dim) * 4
    return {"splits": tiling.splits, "key_tile": tiling.key_tile, "bytes_ratio": round(moved / least, 4)}


def _row_bytes(pages: KvPages, seen: int, sector: int) -> int:
    """Bytes of the codes and scales of one sequence's `seen` tokens, in whole sectors for each block."""

    block_size, total = pages.block_size, 0
    for tokens in [block_size] * (seen // block_size) + [seen % block_size]:
        held = (pages.k,) if pages.latent else (pages.k, pages.v)
        for codes in held:
            total += round_up(tokens * codes.shape[3] * codes.shape[4] * codes.dtype.itemsize, sector)
        if pages.scale_per_row:
            total += len(held) * pages.num_kv_heads * round_up(tokens * 4, sector)
    return total
