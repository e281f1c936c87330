# SPDX-License-Identifier: Apache-2.0
"""Verify: drafts run through the target in one pass and accepted on the device. Decode is verify with no drafts."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.sampling.accept import accepted_lengths
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import uniform_batch
from metrale_jax.steps.outcome import StepOutput, remembering, sample_rows
from metrale_jax.steps.target import run_target


def verify(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    drafts: Int[Array, "S J"],
    draft_lens: Int[Array, " S"],
    num_logprobs: int = 0,
) -> tuple[Pool, SequenceState, StepOutput]:
    """Pool and state after each row's accepted drafts, and the tokens drawn: the accepted ones and one more.

    The first `draft_lens[s]` of a row are drafts. What rejected drafts wrote to the pool lies past `seq_len` and is
    never read. Blocks for `draft_lens + 1` more tokens must be in the table.
    """
    batch = uniform_batch(state, drafts, draft_lens, model.layout.block_size)
    hidden, pool = run_target(model, params, pool, batch)
    state, out = after_verify(model, params, state, hidden, drafts, draft_lens, num_logprobs)
    return pool, state, out


def after_verify(model, params, state, hidden, drafts, draft_lens, num_logprobs):
    """State and output from the rows' hidden vectors `[S (J + 1), D]`."""
    width = drafts.shape[1] + 1
    logits = head_logits(model, params, hidden, jnp.arange(hidden.shape[0], dtype=jnp.int32))
    positions = state.seq_len[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)
    active = state.seq_len > 0
    # Each drafted position looks back on the drafts before it; what was drawn instead then takes their place.
    state = remembering(state, positions[:, :-1], drafts, active)
    out = sample_rows(logits, state.sampling, positions, num_logprobs)
    state = remembering(state, positions, out.tokens, active)
    accepted = accepted_lengths(drafts, draft_lens, out.tokens)
    last = jnp.take_along_axis(out.tokens, accepted[:, None], axis=1)[:, 0]
    state = state.replace(
        seq_len=jnp.where(active, state.seq_len + accepted + 1, 0),
        last_token=jnp.where(active, last, state.last_token),
    )
    return state, out.replace(num_tokens=jnp.where(active, accepted + 1, 0))
