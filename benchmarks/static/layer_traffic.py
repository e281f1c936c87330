# SPDX-License-Identifier: Apache-2.0
"""Bytes of device memory that calls of recurrent layers and of mixtures of experts move, against the least they could.

A state is counted program by program, in whole sectors. What programs of one sequence read alike, keys and the like, is
fetched once: of a step it is a few MB at most, which stay in a GPU's second cache. Rows that experts get are spread
over as many experts as there are, so that each weight that is met is as much as it can be.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp

from benchmarks.static.row import Row
from pallas_kernels import triton_arrays
from pallas_kernels.gated_delta.triton import TILE
from pallas_kernels.grouped_matmul import mosaic_tpu
from pallas_kernels.shapes import ceil_div, next_power_of_two, round_up
from pallas_kernels.ssd.triton import tile_of
from pallas_kernels.state_rows import CHUNK
from pallas_kernels.storage import padded_bytes

SECTOR = 32
WIDE = 4
# Rows of an expert that one tile has.
FEW = 8


def _item(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _size(shapes) -> int:
    total = 0
    for shape in shapes:
        count = 1
        for side in shape:
            count *= side
        total += count
    return total


def _ratio(moved: float, least: float) -> dict:
    return {"least_bytes": int(least), "bytes_ratio": round(moved / least, 4)}


def _pending(sizes) -> tuple[int, int]:
    """Bytes of pending tokens moved and least, all that a slot has room for accepted and as many drafted as fit."""
    token = WIDE * _size(sizes.token)
    waiting, drafts = sizes.room * token, (sizes.width - 1) * token
    # Gathered beside the kernel, which reads what was gathered; stored again with what was there before.
    return 3 * waiting + (3 * drafts if sizes.width > 1 else 0), waiting + drafts


def delta_traffic(row: Row) -> dict:
    """Of equal rows, each of whose states is read once and written once at the least."""
    if row.platform == "tpu":
        return _tpu_delta_traffic(row)
    sizes, item, kept = row.sizes, _item(row.dtype), _item(row.kv_format)
    tile = min(max(triton_arrays.NARROWEST, TILE // next_power_of_two(sizes.rows)), next_power_of_two(sizes.columns))
    pieces = [min(tile, sizes.columns - start) for start in range(0, sizes.columns, tile)]
    states = 2 * sizes.heads * sizes.rows * sum(round_up(piece * kept, SECTOR) for piece in pieces)
    keys, values, decays, strengths = sizes.token
    tokens = sizes.width * (item * _size((keys, keys, values, values)) + WIDE * _size((decays, strengths)))
    moved, least = _pending(sizes)
    whole = 2 * kept * sizes.heads * next_power_of_two(sizes.rows) * tile * len(pieces) + tokens
    found = _ratio(states + tokens + moved, 2 * kept * sizes.state_size + tokens + least)
    return {**found, "unmasked_bytes": whole}


def _tpu_delta_traffic(row: Row) -> dict:
    """The same as a TPU lays states out, which no kernel can help. Tokens are taken as they are where each row has one
    in float32; others are first made such, behind the pending ones, and answers turned back."""
    sizes, item = row.sizes, _item(row.dtype)
    keys, values, decays, strengths = sizes.token
    length = sizes.room + sizes.width
    states = 2 * padded_bytes((sizes.heads, sizes.rows, sizes.columns), row.kv_format)
    tokens = sizes.width * (item * _size((keys, keys, values, values)) + WIDE * _size((decays, strengths)))
    counts = (length, sizes.width, length, *((length,) if sizes.per_channel else ()))
    widths = keys, keys, values, *((decays,) if sizes.per_channel else ())
    laid = sum(padded_bytes((x[0], n, x[1]), "float32") for n, x in zip(counts, widths, strict=True))
    answers = padded_bytes((sizes.heads, sizes.width, sizes.columns), row.dtype)
    moved = tokens if length == 1 and item == WIDE else tokens + 2 * (laid + answers)
    pending = [sum(padded_bytes((n, *x), "float32") for x in sizes.token) for n in (sizes.room, sizes.width - 1) if n]
    found = _ratio(states + moved + 3 * sum(pending), states + tokens + sum(pending))
    return {**found, "layout_ratio": round(states / (2 * _item(row.kv_format) * sizes.state_size), 4)}


def ssd_traffic(row: Row) -> dict:
    """As `delta_traffic`; tokens are widened to float32 before the kernel reads them, which is written and read."""
    if row.platform == "tpu":
        return _tpu_ssd_traffic(row)
    sizes, item, kept = row.sizes, _item(row.dtype), _item(row.kv_format)
    states = 2 * sizes.num_heads * sizes.head_dim * round_up(sizes.state_dim * kept, SECTOR)
    x, dt, b = sizes.token
    narrow, wide, out = _size((x, b, b)), _size((x, b, b, dt)), WIDE * _size((x,))
    moved, least = _pending(sizes)
    tokens = sizes.width * (item * narrow + WIDE * sizes.num_heads + out)
    moved += states + tokens + 2 * sizes.width * WIDE * wide
    tile = tile_of(sizes.head_dim)
    whole = ceil_div(sizes.head_dim, tile) * tile * next_power_of_two(sizes.state_dim)
    found = _ratio(moved, 2 * kept * sizes.state_size + tokens + least)
    return {**found, "unmasked_bytes": 2 * kept * sizes.num_heads * whole + tokens}


def _tpu_ssd_traffic(row: Row) -> dict:
    """The same as a TPU lays arrays out, which no kernel can help. The kernel takes x as it lies, and what is pending
    where it lies; b and c are widened for it. All that a slot has room for is read, and if a row drafts written."""
    sizes = row.sizes
    x, dt, b = sizes.token
    kept = padded_bytes((sizes.num_heads, sizes.head_dim, sizes.state_dim), row.kv_format)
    tokens = sum(padded_bytes((sizes.width, *shape), kind) for shape, kind in ((x, row.dtype), (dt, "float32")))
    tokens += 2 * padded_bytes((sizes.width, *b), row.dtype) + padded_bytes((sizes.width, *x), "float32")
    waiting = [
        sum(padded_bytes((n, *shape), "float32") for shape in sizes.token) for n in (sizes.room, sizes.width - 1)
    ]
    least = 2 * kept + tokens + (waiting[0] if sizes.room else 0) + (waiting[1] if sizes.width > 1 else 0)
    widened = 0 if row.dtype == "float32" else 2 * 2 * padded_bytes((sizes.width, *b), "float32")
    whole = waiting[0] - waiting[1] if sizes.width > 1 else 0
    found = _ratio(least + widened + whole, least)
    return {**found, "layout_ratio": round(kept / (_item(row.kv_format) * sizes.state_size), 4)}


def ssd_ragged_traffic(row: Row) -> dict:
    """A sequence's share of the least; how much more is moved is not counted, as arithmetic limits ragged rows."""
    sizes, item, kept = row.sizes, _item(row.dtype), _item(row.kv_format)
    x, dt, b = sizes.token
    tokens = sizes.width * (item * _size((x, b, b)) + WIDE * _size((dt, x)))
    states = sizes.num_sequences * (2 * kept * sizes.state_size + sizes.room * WIDE * _size(sizes.token))
    return {"least_bytes": (tokens + states) // sizes.num_sequences}


def conv_traffic(row: Row) -> dict:
    """A tail read once and written once, the row's tokens and answers, and what is pending as far as there is room."""
    if row.platform == "tpu":
        # That nothing else is moved is told by temporaries, which there are none of.
        return {}
    sizes, item = row.sizes, _item(row.kv_format)
    parts = 2 * (sizes.taps - 1) + 2 * sizes.width + sizes.room + sizes.width - 1
    # Taps and bias, which all rows share, stay in a GPU's second cache.
    shared = (sizes.taps + 1) * _item(row.dtype) * sizes.channels / sizes.num_sequences
    moved = least = parts * item * sizes.channels + shared
    asked = least + (sizes.taps + 1) * _item(row.dtype) * sizes.channels
    return {**_ratio(moved, least), "unmasked_bytes": asked}


def conv_ragged_traffic(row: Row) -> dict:
    """As XLA's programs on a GPU do it: all tokens once, and of each sequence the zeros that it may begin with, its
    history gathered, read for the first tokens and written with the last."""
    if row.platform == "tpu":
        return {}
    sizes, item = row.sizes, _item(row.kv_format)
    tail, tokens = (sizes.taps - 1) * sizes.num_sequences, 2 * sizes.width
    least = (tokens + 2 * tail) * sizes.channels * item
    return _ratio((tokens + 7 * tail) * sizes.channels * item, least)


def expert_least(row: Row) -> int:
    """The weights that rows meet, rows and answers."""
    sizes = row.sizes
    weights = min(sizes.num_rows, sizes.experts) * sizes.width * sizes.depth
    return (weights + sizes.num_rows * (sizes.depth + sizes.out_width)) * _item(row.dtype)


def expert_traffic(row: Row) -> dict:
    """Of few rows, each of an expert of its own as far as there are such; of many, arithmetic is the limit."""
    sizes, item, least = row.sizes, _item(row.dtype), expert_least(row)
    if sizes.num_rows > sizes.experts * FEW:
        return {}
    if row.platform == "tpu":
        return _ratio(least + _laid_out(sizes, min(sizes.num_rows, sizes.experts), item), least)
    # The answer is zeros before the kernel writes to it.
    return _ratio(least + sizes.num_rows * sizes.out_width * item, least)


def _laid_out(sizes, met: int, item: int) -> int:
    """Bytes of a TPU's rows as they are laid out by tiles: gathered, read for each piece of a weight, and read back."""
    tile = expert_tile(sizes)
    columns = mosaic_tpu.columns_for(sizes.out_width, sizes.depth, item, sizes.width // sizes.out_width)
    real = met * ceil_div(sizes.num_rows // met, tile)
    laid, answers = real * tile * sizes.depth * item, real * tile * sizes.out_width * item
    return laid * (1 + ceil_div(sizes.out_width, columns)) + 2 * answers


def expert_tile(sizes) -> int:
    """Rows of a TPU kernel's tile."""
    rows = next_power_of_two(sizes.num_rows // sizes.experts)
    return min(mosaic_tpu.MOST_ROWS, max(mosaic_tpu.LEAST_ROWS, rows))


def ragged_traffic(row: Row) -> dict:
    """Of ragged rows no more than the least, for each sequence: arithmetic is the limit of many tokens."""
    sizes, kept = row.sizes, _item(row.kv_format)
    keys, values, decays, strengths = sizes.token
    token = _item(row.dtype) * _size((keys, keys, values, values)) + WIDE * _size((decays, strengths))
    return {"least_bytes": 2 * kept * sizes.state_size + sizes.width * token // sizes.num_sequences}


def ragged_flops(sizes) -> int:
    """Of ragged rows in whole chunks, each product taken once: of keys and queries with keys, with the state before and
    with what is written, and of the state after."""
    rows, columns = sizes.rows, sizes.columns
    return 2 * sizes.width * sizes.heads * (2 * CHUNK * (rows + columns) + 3 * rows * columns)


TRAFFIC: Mapping[str, Callable[[Row], dict]] = MappingProxyType(
    {
        "gated_delta": delta_traffic,
        "gated_delta_ragged": ragged_traffic,
        "ssd_rows": ssd_traffic,
        "ssd_ragged": ssd_ragged_traffic,
        "conv_rows": conv_traffic,
        "conv_ragged": conv_ragged_traffic,
        "grouped_matmul": expert_traffic,
    }
)
