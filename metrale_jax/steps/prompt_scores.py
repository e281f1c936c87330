# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.sampling.sample import chosen_logprobs

PIECE = 32


@struct.dataclass
class PromptScores:
    """float32 `logprobs [T]` and `top_logprobs [T, k]`, int32 `top_ids [T, k]`."""

    logprobs: Any
    top_ids: Any
    top_logprobs: Any


def prompt_logprobs(
    model: Model, params: DecoderParams, hidden: Float[Array, "T D"], targets: Int[Array, " T"], num_logprobs: int
) -> PromptScores:
    """Temporary."""
    size = min(PIECE, hidden.shape[0])

    def piece(pair):
        rows, wanted = pair
        logits = head_logits(model, params, rows, jnp.arange(size, dtype=jnp.int32))
        return PromptScores(*chosen_logprobs(logits, wanted, num_logprobs))

    out = jax.lax.map(piece, (hidden.reshape(-1, size, hidden.shape[1]), targets.reshape(-1, size)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)
