# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: the few small arrays that a step sends to the host, in one transfer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.sampling.sample import chosen_logprobs, draw


@struct.dataclass
class StepOutput:
    """What a step drew.

    int32 `tokens [S, Q]`, of which the first `num_tokens [S]` stand; bool `finite [S]`, false where a logit was not a
    finite number. float32 `logprobs [S, Q]` and `top_logprobs [S, Q, k]` with int32 `top_ids`, or `()` where the
    step was built without them.
    """

    tokens: Any
    num_tokens: Any
    finite: Any
    logprobs: Any = ()
    top_ids: Any = ()
    top_logprobs: Any = ()


def sample_rows(
    logits: Float[Array, "R V"], state: SequenceState, positions: Int[Array, "S Q"], num_logprobs: int
) -> StepOutput:
    """Tokens for `Q` consecutive positions of each sequence, `R = S Q` rows; all of them are taken to stand."""
    num_sequences, width = positions.shape
    sampling = _repeated(state.sampling, width)
    tokens = draw(logits, sampling, positions.reshape(-1))
    out = StepOutput(
        tokens=tokens.reshape(num_sequences, width),
        num_tokens=jnp.full(num_sequences, width, jnp.int32),
        finite=jnp.all(jnp.isfinite(logits), axis=-1).reshape(num_sequences, width).all(axis=1),
    )
    if not num_logprobs:
        return out
    chosen, ids, top = chosen_logprobs(logits, tokens, num_logprobs)
    return out.replace(
        logprobs=chosen.reshape(num_sequences, width),
        top_ids=ids.reshape(num_sequences, width, -1),
        top_logprobs=top.reshape(num_sequences, width, -1),
    )


def _repeated(sampling: SamplingState, width: int) -> SamplingState:
    if width == 1:
        return sampling
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), sampling)
