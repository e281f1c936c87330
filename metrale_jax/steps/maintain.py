# SPDX-License-Identifier: Apache-2.0
"""Small device-side upkeep between steps: picking rows of states, so that no token has to visit the host."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def gather_rows(
    sources: tuple[tuple[Int[Array, " A"], Int[Array, " A"]], ...],
    rows: Int[Array, " S"],
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """`seq_len` and `last_token` of a new batch, picked from the rows of several states laid end to end.

    `sources` holds (seq_len, last_token) of each state. Row -1 is padding and comes back zero.
    """
    seq_len = jnp.concatenate([pair[0] for pair in sources])
    last_token = jnp.concatenate([pair[1] for pair in sources])
    real = rows >= 0
    picked = jnp.where(real, rows, 0)
    return jnp.where(real, seq_len[picked], 0), jnp.where(real, last_token[picked], 0)
