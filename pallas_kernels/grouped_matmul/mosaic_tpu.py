# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul for TPUs, in Pallas over Mosaic.

Rows are first laid out so that each tile holds rows of one group. A program multiplies a tile with some outputs of its
expert's weight; tiles of a group follow each other, and those without rows name the last group again, so that each
weight that rows chose is fetched once and no other is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.activations import Activation, activated
from pallas_kernels.grouped_matmul.tiles import cut
from pallas_kernels.shapes import ceil_div, next_power_of_two

DTYPES = ("bfloat16", "float32")
LANES = 128
# Rows of a tile: packed bfloat16 comes in sixteens, and more rows than 128 gain nothing once a weight is there.
LEAST_ROWS, MOST_ROWS = 16, 128
# Of a weight's outputs as many at a time as leave room for two such pieces beside the rows.
WEIGHT_BYTES = 4 << 20


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    dtype, weight_dtype = jnp.dtype(facts["dtype"]), jnp.dtype(facts["weight_dtype"])
    if dtype.name not in DTYPES or weight_dtype != dtype:
        return f"rows of {dtype.name} and weights of {weight_dtype.name} are not both of one of {DTYPES}"
    odd = [size for size in (facts["depth"], facts["out_width"]) if size % LANES]
    return f"inputs or outputs of {odd[0]} are no multiple of {LANES}" if odd else ""


@dataclass(frozen=True)
class _Call:
    activation: Activation | None
    has_bias: bool


def columns_for(out_width: int, depth: int, itemsize: int, halves: int) -> int:
    """Outputs of a program: the most multiples of 128 that divide `out_width` and fit."""
    fitting = [
        size
        for size in range(LANES, out_width + 1, LANES)
        if out_width % size == 0 and size * depth * itemsize * halves <= WEIGHT_BYTES
    ]
    return max(fitting, default=LANES)


def matmul(
    x: Float[Array, "T D"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    bias: Any,
    activation: Activation | None,
    interpret: bool = False,
) -> Float[Array, "T Fo"]:
    """See `op.grouped_matmul`."""
    (num_rows, depth), (num_experts, width, _) = x.shape, weights.shape
    halves = 2 if activation is not None and activation.gated else 1
    out_width = width // halves
    tile = min(MOST_ROWS, max(LEAST_ROWS, next_power_of_two(num_rows // num_experts)))
    tiles = cut(group_sizes, num_rows, tile)
    count = tiles.expert.shape[0]
    last = tiles.expert[jnp.maximum(tiles.count[0] - 1, 0)]
    expert = jnp.where(tiles.end > tiles.start, tiles.expert, last)
    # Where each row of a tile comes from, and where each row went.
    source = tiles.start[:, None] + jnp.arange(tile, dtype=jnp.int32)
    rows = x.at[source.reshape(-1)].get(mode="clip")
    columns = columns_for(out_width, depth, weights.dtype.itemsize, halves)
    # The halves of a gated weight are pieces of their own.
    pieces = weights.reshape(num_experts, halves, out_width, depth)
    has_bias = not isinstance(bias, tuple)
    biases = (bias.reshape(num_experts, halves, 1, out_width),) if has_bias else ()
    bias_block = pl.BlockSpec((1, halves, 1, columns), lambda n, t, expert, _: (expert[t], 0, 0, n))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(ceil_div(out_width, columns), count),
        in_specs=[
            pl.BlockSpec((tile, depth), lambda n, t, expert, count: (jnp.minimum(t, jnp.maximum(count[0] - 1, 0)), 0)),
            pl.BlockSpec((1, halves, columns, depth), lambda n, t, expert, _: (expert[t], 0, n, 0)),
            *((bias_block,) if has_bias else ()),
        ],
        out_specs=pl.BlockSpec((tile, columns), lambda n, t, *_: (t, n)),
    )
    out = pl.pallas_call(
        partial(_program, _Call(activation, has_bias)),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((count * tile, out_width), x.dtype),
        interpret=interpret,
        name="grouped_matmul",
    )(expert, tiles.count, rows, pieces, *biases)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    of = jnp.searchsorted(jnp.where(tiles.end > tiles.start, tiles.start, num_rows), row, side="right") - 1
    of = jnp.maximum(of, 0).astype(jnp.int32)
    own = out.at[of * tile + row - tiles.start[of]].get(mode="clip")
    return jnp.where(row[:, None] < jnp.sum(group_sizes), own, 0)


matmul_interpreted = partial(matmul, interpret=True)


def _program(call: _Call, expert_ref, count_ref, x_ref, weight_ref, *refs):
    del expert_ref
    out_ref = refs[-1]

    @pl.when(pl.program_id(1) < count_ref[0])
    def _():
        rows = x_ref[...]
        sums = [_dot(rows, weight_ref[0, half]) for half in range(weight_ref.shape[1])]
        if call.has_bias:
            sums = [total + refs[0][0, half].astype(jnp.float32) for half, total in enumerate(sums)]
        out = sums[0] if call.activation is None else activated(sums[0], sums[-1], call.activation)
        out_ref[...] = out.astype(out_ref.dtype)


def _dot(rows, weight):
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, numbers, precision=precision, preferred_element_type=jnp.float32)
