# SPDX-License-Identifier: Apache-2.0
"""Score: logits of every token of a chunk, for evaluation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch
from metrale_jax.steps.outcome import remembering_chunks
from metrale_jax.steps.target import run_target


def score(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S"],
) -> tuple[Pool, SequenceState, Float[Array, "T V"]]:
    """Pool and state as after `prefill`, and the float32 logits after each token; rows of padding mean nothing."""
    batch = ragged_batch(state, tokens, lengths, model.layout.block_size)
    hidden, pool = run_target(model, params, pool, batch)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    state = remembering_chunks(state, tokens, lengths)
    return pool, state.replace(seq_len=state.seq_len + lengths), head_logits(model, params, hidden, rows)
