# SPDX-License-Identifier: Apache-2.0
"""`Budget`: what a model takes of each device's memory, and how many sequences of which length that leaves room for."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.sharding.rules import tensor_size
from pallas_kernels.shapes import ceil_div


@dataclass(frozen=True)
class Budget:
    """Bytes on one device: `capacity` that programs can have, `weights`, one `block` of every group of layers, one
    recurrent `slot`, and the `workspace` of the largest program."""

    capacity: int
    weights: int
    block: int
    slot: int
    workspace: int
    block_size: int

    def num_blocks(self, num_sequences: int, context: int) -> int:
        """Blocks that so many sequences of `context` tokens can hold at once, as the engine counts them."""
        return num_sequences * (ceil_div(context, self.block_size) + 1) + 1

    def pool(self, num_sequences: int, context: int) -> int:
        """Bytes of blocks and slots for so many sequences."""
        return self.num_blocks(num_sequences, context) * self.block + (num_sequences + 1) * self.slot

    @property
    def room(self) -> int:
        """Bytes that weights and workspace leave; less than nothing if they do not fit."""
        return self.capacity - self.weights - self.workspace

    def fits(self, num_sequences: int, context: int) -> bool:
        """Whether weights, workspace and the blocks of so many sequences fit."""
        return self.pool(num_sequences, context) <= self.room

    def max_sequences(self, context: int) -> int:
        """The most sequences of `context` tokens; 0 if not even one fits."""
        each = (ceil_div(context, self.block_size) + 1) * self.block + self.slot
        return max(0, (self.room - self.block - self.slot) // each)

    def max_context(self, num_sequences: int, limit: int) -> int:
        """The longest context, up to `limit`, of so many sequences; 0 if not even a block each fits."""
        left = self.room - self.block - (num_sequences + 1) * self.slot
        blocks = left // (num_sequences * self.block) - 1
        return max(0, min(limit, blocks * self.block_size))


def budget_of(model: Model, params: DecoderParams, capacity: int, workspace: int) -> Budget:
    """The budget of a model whose `params` are shapes with shardings."""
    layout = model.layout
    block = sum(layout.bytes_per_block(group) for group in range(len(layout.groups)))
    return Budget(
        capacity=capacity,
        weights=sum(map(device_bytes, jax.tree.leaves(params))),
        block=block // tensor_size(model.mesh),
        slot=layout.bytes_per_slot,
        workspace=workspace,
        block_size=layout.block_size,
    )


def device_bytes(leaf: Any) -> int:
    """Bytes that one device holds of an array; `leaf` is its shape, with its sharding if it is shared out."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype).size * jnp.dtype(leaf.dtype).itemsize
