# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism (Shoeybi et al. 2019): a function of whole arrays as one over each device's heads and channels.

Inside, everything has local shapes and is the code of one device, but for the sums of partial products that `linear`
takes over the axis: one after attention's output projection and one after the feed-forward layer's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

AXIS = "tensor"
WHOLE = PartitionSpec()


def over_devices(function: Callable, mesh: Mesh, inputs: Any, outputs: Any) -> Callable:
    """`function` run on every device of `mesh` with its slice of each argument; `inputs` and `outputs` are trees of
    `PartitionSpec`, prefixes of the arguments' and the results'. A result under `WHOLE` is the same on every device."""
    # What opaque kernels return has no known variance over the mesh, so that none is tracked.
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def summed(x: Float[Array, "..."], axis: str) -> Float[Array, "..."]:
    """The sum over the devices of `axis`; x itself where that is empty."""
    return jax.lax.psum(x, axis) if axis else x


def gathered(x: Float[Array, "R V"], axis: str) -> Float[Array, "R _"]:
    """The columns of all devices of `axis` side by side; x itself where that is empty."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True) if axis else x


def looked_up(tokens: Int[Array, " T"], table: Float[Array, "V D"], axis: str) -> Float[Array, "T D"]:
    """Rows of a table of which each device of `axis` holds as many, in order."""
    held = table.shape[0]
    local = tokens - jax.lax.axis_index(axis) * held
    mine = (local >= 0) & (local < held)
    rows = table.at[jnp.where(mine, local, 0)].get(mode="clip")
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0), axis)
