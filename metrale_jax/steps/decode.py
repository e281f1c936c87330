# SPDX-License-Identifier: Apache-2.0
"""Decode: one token more for each sequence."""

import jax.numpy as jnp

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.state.pool import Pool
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.verify import verify


def decode(
    model: Model, params: DecoderParams, pool: Pool, state: SequenceState, num_logprobs: int = 0
) -> tuple[Pool, SequenceState, StepOutput]:
    """Pool, state and token after running each sequence's last token: verify with no drafts."""
    num_sequences = state.seq_len.shape[0]
    none = jnp.zeros((num_sequences, 0), jnp.int32)
    return verify(model, params, pool, state, none, jnp.zeros(num_sequences, jnp.int32), num_logprobs)
