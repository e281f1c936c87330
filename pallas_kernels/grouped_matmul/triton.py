# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul for NVIDIA GPUs, in Pallas over Triton.

A program multiplies a tile of one group's rows with some outputs of its expert's weight, which lies as it is stored.
Tiles come from the groups' sizes on the device: there are as many programs as any sizes need, and those without rows
read and write nothing. A gated activation closes the program that has summed both a gate's outputs and up's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.activations import Activation, activated
from pallas_kernels.grouped_matmul.tiles import Tiles, cut
from pallas_kernels.shapes import ceil_div, next_power_of_two

DTYPES = ("bfloat16", "float16", "float32")
# Sides of a matrix instruction, and of the largest tile whose sums stay in registers.
LEAST_ROWS, MOST_ROWS = 16, 128


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    dtype, weight_dtype = jnp.dtype(facts["dtype"]), jnp.dtype(facts["weight_dtype"])
    # Offsets overflow in arrays of single bytes alone (see `storage`), which no weight here is made of.
    if dtype.name not in DTYPES or weight_dtype != dtype:
        return f"rows of {dtype.name} and weights of {weight_dtype.name} are not both of one of {DTYPES}"
    return ""


@dataclass(frozen=True)
class Tiling:
    """Rows, outputs and inputs that a program has at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int


@dataclass(frozen=True)
class _Call:
    tiling: Tiling
    activation: Activation | None
    interpret: bool


@struct.dataclass
class _Inputs:
    x: Any
    weights: Any
    bias: Any
    tiles: Tiles


def tiling_for(num_rows: int, num_experts: int, dtype: jnp.dtype, gated: bool) -> Tiling:
    """Small tiles for small groups, which wait for weights; large ones for large groups, which multiply."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, next_power_of_two(num_rows // num_experts)))
    wide = jnp.dtype(dtype).itemsize > 2
    columns = (32 if wide else 64) if gated or rows < 64 else (64 if wide else 128)
    depth = 32 if wide else (128 if rows < 64 and not gated else 64)
    return Tiling(rows, columns, depth, num_warps=8 if rows >= 128 else 4)


def matmul(
    x: Float[Array, "T D"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    bias: Any,
    activation: Activation | None,
    interpret: bool = False,
) -> Float[Array, "T Fo"]:
    """See `op.grouped_matmul`."""
    (num_rows, _), (num_experts, width, _) = x.shape, weights.shape
    gated = activation is not None and activation.gated
    tiling = tiling_for(num_rows, num_experts, x.dtype, gated)
    tiles = cut(group_sizes, num_rows, tiling.rows)
    inputs = _Inputs(x, weights, bias, tiles)
    out_width = width // 2 if gated else width
    # Rows of no group are written by no program.
    begin = jnp.zeros((num_rows, out_width), x.dtype)
    return pl.pallas_call(
        partial(_program, _Call(tiling, activation, interpret)),
        grid=(tiles.expert.shape[0], ceil_div(out_width, tiling.columns)),
        out_shape=jax.ShapeDtypeStruct(begin.shape, begin.dtype),
        input_output_aliases={len(jax.tree.leaves(inputs)): 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(inputs, begin)


matmul_interpreted = partial(matmul, interpret=True)


def _program(call: _Call, inputs: _Inputs, _, out_ref):
    tiling, activation = call.tiling, call.activation
    tile = pl.program_id(0)
    expert, start, end = (ref[tile] for ref in (inputs.tiles.expert, inputs.tiles.start, inputs.tiles.end))
    row = start + jax.lax.iota(jnp.int32, tiling.rows)
    used = row < end
    width, out_width = inputs.weights.shape[1], out_ref.shape[1]
    column = pl.program_id(1) * tiling.columns + jax.lax.iota(jnp.int32, tiling.columns)
    inside = column < out_width
    gated = activation is not None and activation.gated
    # The outputs that are summed: the gate's and up's, or the only ones.
    firsts = (0, width // 2) if gated else (0,)
    depth = inputs.x.shape[1]
    # A tile without rows takes no step.
    steps = jnp.minimum(end - start, 1) * ceil_div(depth, tiling.depth)

    def step(index, sums):
        inner = index * tiling.depth + jax.lax.iota(jnp.int32, tiling.depth)
        some = inner < depth
        rows = plgpu.load(inputs.x.at[row[:, None], inner[None, :]], mask=used[:, None] & some[None, :], other=0.0)
        return tuple(
            total
            + _dot(
                rows,
                plgpu.load(
                    inputs.weights.at[expert, first + column[:, None], inner[None, :]],
                    mask=inside[:, None] & some[None, :],
                    other=0.0,
                ),
                call.interpret,
            )
            for first, total in zip(firsts, sums, strict=True)
        )

    zeros = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, (zeros,) * len(firsts))
    if not isinstance(inputs.bias, tuple):
        sums = tuple(
            total
            + plgpu.load(inputs.bias.at[expert, first + column], mask=inside, other=0.0).astype(jnp.float32)[None, :]
            for first, total in zip(firsts, sums, strict=True)
        )
    out = sums[0] if activation is None else activated(sums[0], sums[-1], activation)
    plgpu.store(
        out_ref.at[row[:, None], column[None, :]],
        out.astype(out_ref.dtype),
        mask=used[:, None] & inside[None, :],
    )


def _dot(rows, weight, interpret: bool):
    precision = None
    if rows.dtype == jnp.float32:
        # Three products of TF32 are float32's.
        precision = jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, numbers, precision=precision, preferred_element_type=jnp.float32)
