# SPDX-License-Identifier: Apache-2.0
"""From token ids to vectors, and from vectors to logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.layers.linear import Linear, project
from metrale_jax.layers.parallel import looked_up


def embed(tokens: Int[Array, " T"], table: Float[Array, "V D"], scale: float, axis: str = "") -> Float[Array, "T D"]:
    """Rows of `table` times `scale`, which is rounded to the table's dtype first, as the checkpoints' training did.

    `axis` names the mesh axis whose devices hold a slice of the table each, if they do.
    """
    rows = looked_up(tokens, table, axis) if axis else table.at[tokens].get(mode="clip")
    return rows if scale == 1.0 else rows * jnp.asarray(scale, table.dtype)


def logits(x: Float[Array, "R D"], head: Float[Array, "V D"], scale: float, softcap: float) -> Float[Array, "R V"]:
    """Float32 logits, times `scale`, bounded by `softcap * tanh(logit / softcap)` where softcap is not 0."""
    out = project(x, Linear(head))
    if scale != 1.0:
        out = out * scale
    return softcap * jnp.tanh(out / softcap) if softcap else out
