# SPDX-License-Identifier: Apache-2.0
"""State space duality for NVIDIA GPUs, equal rows: each state is read once, taken through its tokens in registers, and
written once.

Rows of a state never meet: a program has `TILE` rows of one head of one sequence, so that even one sequence fills the
chip. What waits in slots is read, and written, beside the kernel: heads of a group share it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.shapes import ceil_div, next_power_of_two
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.ssd.xla import joined_rows, with_drafts
from pallas_kernels.state_rows import StateRows
from pallas_kernels.storage import beyond_signed_offsets

WIDEST_TILE, ODD_TILE = 32, 16


class _Inputs(NamedTuple):
    """References to whole arrays: `run`'s `[S, J + Q, ...]`, and of each sequence its slot, whether it goes on, and how
    many of its pending rows count."""

    layer: Any
    slots: Any
    goes_on: Any
    counts: Any
    a: Any
    d: Any
    run: SsdTokens


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    dtype = jnp.dtype(facts["state_dtype"])
    sizes = beyond_signed_offsets(dtype)
    num_bytes = facts["state_elements"] * dtype.itemsize
    if num_bytes in sizes:
        return (
            f"{num_bytes} bytes of states lie between 2 and 4 GiB, where offsets overflow; hold no more than "
            f"{sizes.start - 1} or at least {sizes.stop} of them"
        )
    return ""


def take_rows(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_rows`."""
    new, waiting, run = joined_rows(tokens, storage, layer, rows)
    num_sequences, _, num_heads, head_dim = new.x.shape
    goes_on = (rows.starts > 0) & (rows.query_lens > 0)
    counts = jnp.where(goes_on, rows.num_pending, 0)
    inputs = _Inputs(jnp.asarray(layer, jnp.int32).reshape(1), rows.slots, goes_on, counts, heads.a, heads.d, run)
    tile = tile_of(head_dim)
    outputs, matrix = pl.pallas_call(
        partial(_program, storage.num_pending, tile),
        grid=(num_sequences, num_heads, ceil_div(head_dim, tile)),
        out_shape=[
            jax.ShapeDtypeStruct(new.x.shape, jnp.float32),
            jax.ShapeDtypeStruct(storage.matrix.shape, storage.matrix.dtype),
        ],
        input_output_aliases={len(jax.tree.leaves(inputs)): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="ssd_rows",
    )(inputs, storage.matrix)
    return outputs.reshape(tokens.x.shape), with_drafts(storage, waiting, new, layer, rows).replace(matrix=matrix)


take_rows_interpreted = partial(take_rows, interpret=True)


def tile_of(head_dim: int) -> int:
    """Rows of a state that a program has: as many as divide a head's, if those are no odd number."""
    divisor = min(WIDEST_TILE, head_dim & -head_dim)
    return divisor if divisor >= ODD_TILE else ODD_TILE


def _program(num_pending: int, tile: int, inputs: _Inputs, matrix_in, outputs, matrix):
    sequence, head = pl.program_id(0), pl.program_id(1)
    num_heads, head_dim, state_dim = matrix.shape[2:]
    row = pl.program_id(2) * tile + jax.lax.iota(jnp.int32, tile)
    col = jax.lax.iota(jnp.int32, next_power_of_two(state_dim))
    in_rows, in_cols = row < head_dim, col < state_dim
    inside = in_rows[:, None] & in_cols[None, :]
    group = head // (num_heads // inputs.run.b.shape[2])
    place = (inputs.layer[0], inputs.slots[sequence], head, row[:, None], col[None, :])
    state = plgpu.load(matrix_in.at[place], mask=inside & inputs.goes_on[sequence], other=0.0).astype(jnp.float32)
    a, d = inputs.a[head], inputs.d[head]

    def taken(token, state):
        dt = inputs.run.dt[sequence, token, head]
        x = plgpu.load(inputs.run.x.at[sequence, token, head, row], mask=in_rows, other=0.0)
        b = plgpu.load(inputs.run.b.at[sequence, token, group, col], mask=in_cols, other=0.0)
        return jnp.exp(dt * a) * state + (dt * x)[:, None] * b[None, :], x

    def answered(offset, state):
        token = num_pending + offset
        state, x = taken(token, state)
        c = plgpu.load(inputs.run.c.at[sequence, token, group, col], mask=in_cols, other=0.0)
        output = jnp.sum(state * c[None, :], axis=1) + d * x
        plgpu.store(outputs.at[sequence, offset, head, row], output, mask=in_rows)
        return state

    if num_pending:
        state = jax.lax.fori_loop(0, inputs.counts[sequence], lambda token, state: taken(token, state)[0], state)
    state = answered(0, state)
    plgpu.store(matrix.at[place], state.astype(matrix.dtype), mask=inside)
    width = outputs.shape[1]
    if width > 1:
        jax.lax.fori_loop(1, width, answered, state)
