# SPDX-License-Identifier: Apache-2.0
"""Prefill: ragged chunks of prompts over whatever past each sequence has."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch
from metrale_jax.steps.outcome import StepOutput, remembering, remembering_chunks, sample_rows, standing
from metrale_jax.steps.target import run_target


def prefill(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S"],
    num_logprobs: int = 0,
) -> tuple[Pool, SequenceState, StepOutput]:
    """Pool and state after `lengths[s]` more tokens of each sequence, and a token drawn after the last of them.

    `tokens` lays the chunks end to end, padded at its end. The drawn token means something only where a chunk was the
    prompt's last; elsewhere the next chunk's tokens take its place. A length of 0 leaves a sequence as it was.
    """
    batch = ragged_batch(state, tokens, lengths, model.layout.block_size)
    hidden, pool = run_target(model, params, pool, batch)
    state = remembering_chunks(state, tokens, lengths)
    state, out = after_prefill(model, params, state, hidden, lengths, num_logprobs)
    return pool, state, out


def after_prefill(model, params, state, hidden, lengths, num_logprobs):
    """State and output from the chunks' hidden rows `[T, D]`."""
    logits = head_logits(model, params, hidden, jnp.maximum(jnp.cumsum(lengths) - 1, 0))
    seq_len = state.seq_len + lengths
    drawn = sample_rows(logits, state.sampling, seq_len[:, None], num_logprobs)
    out = standing(drawn, jnp.ones_like(lengths))
    state = remembering(state, seq_len[:, None], out.tokens, lengths > 0)
    last = jnp.where(lengths > 0, out.tokens[:, 0], state.last_token)
    return state.replace(seq_len=seq_len, last_token=last), out
