# SPDX-License-Identifier: Apache-2.0
"""Accepting drafts: a draft stands where it equals the token that the target itself draws at that position.

Both are drawn with the same noise, so the stream is the non-speculative one token for token, sampled or greedy.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def accepted_lengths(
    drafts: Int[Array, "S J"], draft_lens: Int[Array, " S"], targets: Int[Array, "S J1"]
) -> Int[Array, " S"]:
    """How many leading drafts of each row equal the targets; `J1` is `J + 1`, its last column the bonus token."""
    within = jnp.arange(drafts.shape[1], dtype=jnp.int32) < draft_lens[:, None]
    agree = (drafts == targets[:, :-1]) & within
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
