# SPDX-License-Identifier: Apache-2.0
"""Paged append for NVIDIA GPUs: keys, values and their scales in one kernel.

XLA makes a scatter of each array, and of a format whose rows have scales two reductions more: six kernels of a few
microseconds where the data take less than one. Here a program encodes `ROW_TILE` rows of single heads, which lie side
by side in the step and by whole tokens in the pool.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import triton_arrays
from pallas_kernels.kv_formats.format import KvFormat
from pallas_kernels.kv_formats.pages import KvPages, codes_of, row_scale
from pallas_kernels.shapes import ceil_div
from pallas_kernels.triton_arrays import both, columns

ROW_TILE, WIDEST = 8, 256


class _Inputs(NamedTuple):
    """References to whole arrays; `head_scales` are those of heads for keys and values, or `()` each."""

    layer: Any
    slots: Any
    rows: tuple
    head_scales: tuple


@dataclass(frozen=True)
class _Call:
    """Static facts: the format, and whether its rows have scales of their own."""

    kv_format: KvFormat
    scale_per_row: bool


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    return triton_arrays.overflow(facts["kv_format"], facts["pool_codes"])


def append(
    pages: KvPages,
    layer: int | Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K Hv"],
    interpret: bool = False,
) -> KvPages:
    """See `op.kv_append`."""
    per_row = pages.scale_per_row
    rows = {"k": keys} if pages.latent else {"k": keys, "v": values}
    scales = {f"{name}_scale": getattr(pages, f"{name}_scale") for name in rows}
    pools = {**{name: getattr(pages, name) for name in rows}, **(scales if per_row else {})}
    head_scales = tuple(() if per_row else scale for scale in scales.values())
    inputs = _Inputs(jnp.asarray(layer, jnp.int32).reshape(1), slots, tuple(rows.values()), head_scales)
    num_inputs = len(jax.tree.leaves(inputs))
    written = pl.pallas_call(
        partial(_program, _Call(pages.format, per_row)),
        grid=(ceil_div(slots.shape[0] * pages.num_kv_heads, ROW_TILE),),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools.values()],
        input_output_aliases={num_inputs + index: index for index in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="kv_append",
    )(inputs, *pools.values())
    return pages.replace(**dict(zip(pools, written, strict=True)))


append_interpreted = partial(append, interpret=True)


def _program(call: _Call, inputs: _Inputs, *pools):
    # The pools come as inputs and, aliased to them, as outputs.
    pools = pools[len(pools) // 2 :]
    num_tokens, num_heads, _ = inputs.rows[0].shape
    row = pl.program_id(0) * ROW_TILE + jax.lax.iota(jnp.int32, ROW_TILE)
    inside = row < num_tokens * num_heads
    token, head = row // num_heads, row % num_heads
    slot, layer = plgpu.load(inputs.slots.at[token], mask=inside, other=0), inputs.layer[0]
    block_size = pools[0].shape[2]
    block, offset = slot // block_size, slot % block_size
    for index, (rows_ref, head_scale) in enumerate(zip(inputs.rows, inputs.head_scales, strict=True)):
        parts = [
            plgpu.load(
                rows_ref.at[token[:, None], head[:, None], cols[None, :]], mask=both(inside[:, None], within), other=0.0
            )
            for cols, within in columns(rows_ref.shape[-1], WIDEST)
        ]
        scale = _scale(call, parts, head_scale, layer, head, inside)
        for (cols, within), part in zip(columns(rows_ref.shape[-1], WIDEST), parts, strict=True):
            plgpu.store(
                pools[index].at[layer, block[:, None], offset[:, None], head[:, None], cols[None, :]],
                codes_of(part, call.kv_format, scale),
                mask=both(inside[:, None], within),
            )
        if call.scale_per_row:
            plgpu.store(pools[len(inputs.rows) + index].at[layer, block, head, offset], scale, mask=inside)


def _scale(call: _Call, parts, head_scale, layer, head, inside):
    """The scale of each row, or `()`."""
    if call.scale_per_row:
        largest = [jnp.max(jnp.abs(part.astype(jnp.float32)), axis=1) for part in parts]
        return row_scale(reduce(jnp.maximum, largest), call.kv_format)
    if isinstance(head_scale, tuple):
        return ()
    return plgpu.load(head_scale.at[layer, head], mask=inside, other=1.0)
