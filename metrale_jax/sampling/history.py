# SPDX-License-Identifier: Apache-2.0
"""The tokens of each sequence by position, kept on the device for the rules that look back.

What lies at or past the position being drawn is never read, so rejected drafts need no undoing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.sequence import SamplingExtras


def remember(
    extras: SamplingExtras | tuple, positions: Int[Array, "S Q"], tokens: Int[Array, "S Q"]
) -> SamplingExtras | tuple:
    """The extras with `tokens` written at `positions`; `()` stays `()`. Positions outside the history are dropped."""
    if isinstance(extras, tuple):
        return extras
    size = extras.history.shape[1]
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    # A negative index would count from the end.
    places = jnp.where(positions < 0, size, positions)
    return extras.replace(history=extras.history.at[rows, places].set(tokens, mode="drop"))


def remember_chunks(
    extras: SamplingExtras | tuple, seq_len: Int[Array, " S"], tokens: Int[Array, " T"], lengths: Int[Array, " S"]
) -> SamplingExtras | tuple:
    """The extras with `lengths[s]` more tokens of each sequence from `seq_len[s]` on, laid end to end in `tokens`."""
    if isinstance(extras, tuple):
        return extras
    offset = jnp.arange(extras.history.shape[1], dtype=jnp.int32) - seq_len[:, None]
    index = (jnp.cumsum(lengths) - lengths)[:, None] + offset
    inside = (offset >= 0) & (offset < lengths[:, None])
    chunk = tokens.at[index].get(mode="clip")
    return extras.replace(history=jnp.where(inside, chunk, extras.history))
