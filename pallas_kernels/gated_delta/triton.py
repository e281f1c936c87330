# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over equal rows for NVIDIA GPUs: a state is read once and written once.

A program holds a tile of columns of one head's state in registers. It takes in the row's accepted pending tokens and
its first new one, writes the tile back, and goes on with the drafts for their outputs alone. Columns of a state have
nothing to do with each other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import triton_arrays
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.shapes import ceil_div, next_power_of_two
from pallas_kernels.state_rows import StateRows, begun, stored_rows, waiting_rows

# Numbers of a state that a program holds: 32 registers of each thread of 4 warps.
TILE, NUM_WARPS, WIDEST, MOST_TOKENS = 4096, 4, 256, 16


class _Inputs(NamedTuple):
    """References to whole arrays; `waiting` is that of pending tokens or `()`."""

    layer: Any
    slots: Any
    num_pending: Any
    q: Any
    tokens: DeltaTokens
    waiting: Any


def supports(rows: int, tokens: int, dtype: str, codes: int, **facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if rows > WIDEST:
        return f"keys of {rows} are above the {WIDEST} whose states fit in registers"
    if tokens > MOST_TOKENS:
        return f"{tokens} pending and new tokens a row are above {MOST_TOKENS}, which are taken in one by one"
    return triton_arrays.overflow(dtype, codes)


def delta_rows(
    q: Float[Array, "S R N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: bool = False,
) -> tuple[Float[Array, "S R V Hv"], Float[Array, "L U V H Hv"], Any]:
    """See `op.delta_rows`."""
    matrix, pending = begun((matrix, pending), layer, rows)
    waiting = waiting_rows(pending, layer, rows)
    num_rows, width = q.shape[:2]
    heads, columns = tokens.values.shape[2:]
    tile = max(triton_arrays.NARROWEST, TILE // next_power_of_two(q.shape[3]))
    tile = min(tile, next_power_of_two(columns))
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    inputs = _Inputs(index, rows.slots, rows.num_pending, q, tokens, waiting)
    out, matrix = pl.pallas_call(
        partial(_program, tile),
        grid=(num_rows, heads, ceil_div(columns, tile)),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, width, heads, columns), q.dtype),
            jax.ShapeDtypeStruct(matrix.shape, matrix.dtype),
        ],
        input_output_aliases={len(jax.tree.leaves(inputs)): 1},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="gated_delta",
    )(inputs, matrix)
    if not isinstance(pending, tuple):
        new = jax.tree.map(lambda leaf: leaf[:, 1:], tokens)
        pending = stored_rows(pending, waiting, new, layer, rows)
    return out, matrix, pending


delta_rows_interpreted = partial(delta_rows, interpret=True)


def _program(tile: int, inputs: _Inputs, _, out, matrix):
    row, head = pl.program_id(0), pl.program_id(1)
    num_rows, num_columns = matrix.shape[3:]
    channel = jax.lax.iota(jnp.int32, next_power_of_two(num_rows))
    column = pl.program_id(2) * tile + jax.lax.iota(jnp.int32, tile)
    inside, within = channel < num_rows, column < num_columns
    layer, slot = inputs.layer[0], inputs.slots[row]
    place = matrix.at[layer, slot, head, channel[:, None], column[None, :]]
    mask = inside[:, None] & within[None, :]
    state = plgpu.load(place, mask=mask, other=0.0).astype(jnp.float32)
    key_head = head // (matrix.shape[2] // inputs.q.shape[2])

    def take(state, tokens, at, used):
        each, some = used & inside, used & within
        key = plgpu.load(tokens.keys.at[row, at, key_head, channel], mask=each, other=0.0).astype(jnp.float32)
        value = plgpu.load(tokens.values.at[row, at, head, column], mask=some, other=0.0).astype(jnp.float32)
        strength = jnp.where(used, tokens.strengths[row, at, head], 0.0)
        if tokens.per_channel:
            decay = plgpu.load(tokens.decays.at[row, at, head, channel], mask=each, other=0.0)[:, None]
        else:
            decay = jnp.where(used, tokens.decays[row, at, head], 0.0)
        state *= jnp.exp(decay)
        wrong = value - jnp.sum(key[:, None] * state, axis=0)
        return state + key[:, None] * (strength * wrong)[None, :]

    if not isinstance(inputs.waiting, tuple):
        count = inputs.num_pending[row]
        for at in range(inputs.waiting.strengths.shape[1]):
            state = take(state, inputs.waiting, at, at < count)
    for at in range(inputs.q.shape[1]):
        state = take(state, inputs.tokens, at, row >= 0)
        query = plgpu.load(inputs.q.at[row, at, key_head, channel], mask=inside, other=0.0).astype(jnp.float32)
        found = jnp.sum(query[:, None] * state, axis=0)
        plgpu.store(out.at[row, at, head, column], found.astype(out.dtype), mask=within)
        if at == 0:
            plgpu.store(place, state.astype(matrix.dtype), mask=mask)
