# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of equal rows for NVIDIA GPUs: each tail is read once and written once, where it lies.

A program has `TILE` channels of one sequence and keeps the last inputs of each in registers: it lets accepted pending
ones and the row's tokens pass by, one after another. Channels have nothing to do with each other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.shapes import ceil_div
from pallas_kernels.state_rows import StateRows

# Channels of a program: four of each thread, which are loaded together.
TILE, NUM_WARPS = 512, 4


class _Inputs(NamedTuple):
    """References to whole arrays; `bias` may be `()`."""

    layer: Any
    slots: Any
    goes_on: Any
    counts: Any
    lens: Any
    x: Any
    weight: Any
    bias: Any


def conv_rows(
    x: Float[Array, "S R C"],
    weight: Float[Array, "W C"],
    bias: Any,
    tail: Float[Array, "L U W1 C"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    silu: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "S R C"], Float[Array, "L U W1 C"], Any]:
    """See `op.conv_rows`."""
    goes_on = (rows.starts > 0) & (rows.query_lens > 0)
    counts = jnp.where(goes_on, rows.num_pending, 0)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    inputs = _Inputs(index, rows.slots, goes_on, counts, rows.query_lens, x, weight, bias)
    storage = (tail, pending)
    first = len(jax.tree.leaves(inputs))
    count = len(jax.tree.leaves(storage))
    out, *kept = pl.pallas_call(
        partial(_program, silu, count),
        grid=(ceil_div(x.shape[2], TILE), x.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (x, *jax.tree.leaves(storage))],
        input_output_aliases={first + index: 1 + index for index in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="conv_rows",
    )(inputs, *jax.tree.leaves(storage))
    return out, *jax.tree.structure(storage).unflatten(kept)


conv_rows_interpreted = partial(conv_rows, interpret=True)


def _program(silu: bool, count: int, inputs: _Inputs, *refs):
    """`refs` are the `count` arrays of storage as they are read, the result, and those of storage as they are written:
    the same memory."""
    tail_in, *pending_in = refs[:count]
    out, tail, *pending = refs[count:]
    row = pl.program_id(1)
    num_channels = out.shape[2]
    channel = pl.program_id(0) * TILE + jax.lax.iota(jnp.int32, TILE)
    inside = channel < num_channels
    there = inputs.lens[row] > 0
    layer, slot = inputs.layer[0], inputs.slots[row]
    taps = [
        plgpu.load(inputs.weight.at[tap, channel], mask=inside, other=0.0).astype(jnp.float32)
        for tap in range(inputs.weight.shape[0])
    ]
    bias = 0.0
    if not isinstance(inputs.bias, tuple):
        bias = plgpu.load(inputs.bias.at[channel], mask=inside, other=0.0).astype(jnp.float32)
    goes_on = inside & inputs.goes_on[row]
    window = tuple(
        plgpu.load(tail_in.at[layer, slot, place, channel], mask=goes_on, other=0.0) for place in range(tail.shape[2])
    )
    if pending_in:

        def fold(place, window):
            return *window[1:], plgpu.load(pending_in[0].at[layer, slot, place, channel], mask=inside, other=0.0)

        window = jax.lax.fori_loop(0, inputs.counts[row], fold, window)
    for token in range(out.shape[1]):
        window = *window, plgpu.load(inputs.x.at[row, token, channel], mask=inside & there, other=0.0)
        # In the order of the portable form, so that both round alike.
        total = window[0].astype(jnp.float32) * taps[0]
        for part, tap in zip(window[1:], taps[1:], strict=True):
            total += part.astype(jnp.float32) * tap
        total += bias
        total = total * jax.nn.sigmoid(total) if silu else total
        plgpu.store(out.at[row, token, channel], total.astype(out.dtype), mask=inside)
        window = window[1:]
        if token == 0:
            for place, part in enumerate(window):
                plgpu.store(tail.at[layer, slot, place, channel], part, mask=inside)
        else:
            drafted = inside & (token < inputs.lens[row])
            plgpu.store(pending[0].at[layer, slot, token - 1, channel], window[-1], mask=drafted)
