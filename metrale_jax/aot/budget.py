# SPDX-License-Identifier: Apache-2.0
"""`Budget`: what a model takes of each device's memory, and how many sequences of which length that leaves room for."""

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.sharding.rules import tensor_size
from pallas_kernels.shapes import ceil_div
from pallas_kernels.storage import Gap, served_count


@dataclass(frozen=True)
class Budget:
    """Bytes on one device: `capacity` that programs can have, `weights`, one `block` of every group of layers as it
    lies in memory, `block_data` of it what is no padding, one recurrent `slot`, of which `num_snapshots` are for states
    that are kept for later prompts, and the `workspace` of the largest program. `gaps` are the counts of blocks that no
    kernel can address (see `storage.served_count`)."""

    capacity: int
    weights: int
    block: int
    block_data: int
    slot: int
    workspace: int
    block_size: int
    gaps: tuple[Gap, ...] = ()
    num_snapshots: int = 0

    def needed_blocks(self, num_sequences: int, context: int) -> int:
        """Blocks that so many sequences of `context` tokens can hold at once, as the engine counts them."""
        return num_sequences * (ceil_div(context, self.block_size) + 1) + 1

    def num_blocks(self, num_sequences: int, context: int) -> int:
        """Blocks of a pool for so many sequences: those they need, or more if so many cannot be addressed."""
        needed = self.needed_blocks(num_sequences, context)
        return max(needed, served_count(needed, self._most_blocks(num_sequences), self.gaps))

    def served(self, num_sequences: int, context: int) -> bool:
        """Whether there is a pool for so many sequences that kernels can address and memory has room for, if it has
        room for what they need."""
        needed, most = self.needed_blocks(num_sequences, context), self._most_blocks(num_sequences)
        return served_count(needed, max(needed, most), self.gaps) >= needed

    def _most_blocks(self, num_sequences: int) -> int:
        if not self.block:
            return sys.maxsize  # blocks of nothing, which count tokens
        return max(0, self.room - (num_sequences + 1) * self.slot) // self.block

    def pool(self, num_sequences: int, context: int) -> int:
        """Bytes of blocks and slots for so many sequences."""
        return self.num_blocks(num_sequences, context) * self.block + (num_sequences + 1) * self.slot

    @property
    def room(self) -> int:
        """Bytes that weights, workspace and kept states leave; less than nothing if they do not fit."""
        return self.capacity - self.weights - self.workspace - self.kept

    @property
    def kept(self) -> int:
        """Bytes of the states that are kept for later prompts."""
        return self.num_snapshots * self.slot

    def fits(self, num_sequences: int, context: int) -> bool:
        """Whether weights, workspace and the blocks of so many sequences fit."""
        return self.pool(num_sequences, context) <= self.room and self.served(num_sequences, context)

    def max_sequences(self, context: int) -> int:
        """The most sequences of `context` tokens; 0 if not even one fits."""
        blocks = ceil_div(context, self.block_size) + 1
        most = max(0, (self.room - self.block - self.slot) // (blocks * self.block + self.slot))
        return min(most, max(0, self._largest_pool(most) - 1) // blocks)

    def max_context(self, num_sequences: int, limit: int) -> int:
        """The longest context, up to `limit`, of so many sequences; 0 if not even a block each fits."""
        blocks = (self._largest_pool(num_sequences) - 1) // num_sequences - 1
        return max(0, min(limit, blocks * self.block_size))

    def _largest_pool(self, num_sequences: int) -> int:
        """Blocks of the largest pool beside the slots of so many sequences that there is room for and kernels for."""
        most = self._most_blocks(num_sequences)
        return served_count(most, most, self.gaps)


def budget_of(model: Model, params: DecoderParams, capacity: int, workspace: int, num_snapshots: int = 0) -> Budget:
    """The budget of a model whose `params` are shapes with shardings."""
    layout, size = model.layout, tensor_size(model.mesh)
    return Budget(
        capacity=capacity,
        weights=sum(map(device_bytes, jax.tree.leaves(params))),
        block=layout.block_bytes // size,
        block_data=layout.block_data_bytes // size,
        slot=layout.bytes_per_slot,
        workspace=workspace,
        block_size=layout.block_size,
        gaps=layout.gaps,
        num_snapshots=num_snapshots,
    )


def device_bytes(leaf: Any) -> int:
    """Bytes that one device holds of an array; `leaf` is its shape, with its sharding if it is shared out."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype).size * jnp.dtype(leaf.dtype).itemsize
