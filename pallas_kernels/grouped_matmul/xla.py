# SPDX-License-Identifier: Apache-2.0
"""The portable form: a loop over tiles of rows of one group each, with as many turns as there are tiles.

An expert that no row chose has no tile, so that its weight is not read. Tiles run in the order of the rows: what one
computes past the end of its group is overwritten by the next.

XLA's `ragged_dot` is no base for it: on CPU and GPU it is one product of all rows with all experts (32 rows of 32
experts of 1536 by 1024 took 476 ms on two busy cores, this loop 45), for a GPU it also copies the weights, and for a
TPU it does so unless they lie turned round.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.activations import Activation, activated
from pallas_kernels.dispatch import by_platform
from pallas_kernels.grouped_matmul.tiles import cut
from pallas_kernels.shapes import next_power_of_two

MAX_TILE = 128
# Rows up to which XLA's CPU kernels are quicker with the weight as their left operand.
FEW_ROWS = 64


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: about a group's fair share, so that few tiles are mostly empty and few groups take many."""
    return min(MAX_TILE, next_power_of_two(num_rows // num_experts))


def matmul(
    x: Float[Array, "T D"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    bias: Any,
    activation: Activation | None,
) -> Float[Array, "T Fo"]:
    """See `op.grouped_matmul`."""
    num_rows, num_experts = x.shape[0], weights.shape[0]
    tile = tile_rows(num_rows, num_experts)
    tiles = cut(group_sizes, num_rows, tile)
    gated = activation is not None and activation.gated
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def turn(index, out):
        expert, start = tiles.expert[index], tiles.start[index]
        rows = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        weight = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        sums = by_platform(_product, cpu=_cpu_product)(rows, weight)
        if not isinstance(bias, tuple):
            sums += bias[expert].astype(jnp.float32)
        sums = finished(sums, activation).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, sums, start, axis=0)

    out = jnp.zeros((num_rows + tile, weights.shape[1] // (2 if gated else 1)), x.dtype)
    out = jax.lax.fori_loop(0, tiles.count[0], turn, out)[:num_rows]
    return jnp.where(jnp.arange(num_rows)[:, None] < jnp.sum(group_sizes), out, 0)


def finished(sums: Float[Array, "T F"], activation: Activation | None) -> Float[Array, "T Fo"]:
    """Float32 sums through the activation, if there is one."""
    if activation is None:
        return sums
    gate, up = jnp.split(sums, 2, axis=-1) if activation.gated else (sums, sums)
    return activated(gate, up, activation)


def _product(rows, weight):
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _cpu_product(rows, weight):
    if rows.shape[0] == 1 or rows.shape[0] > FEW_ROWS:
        return _product(rows, weight)
    # The barrier keeps XLA from turning the operands round again.
    turned = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(turned).T
