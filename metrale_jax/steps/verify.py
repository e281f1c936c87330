# SPDX-License-Identifier: Apache-2.0
"""Verify: drafts run through the target in one pass and accepted on the device. Decode is verify with no drafts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.models.proposer import Drafts
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import uniform_batch
from metrale_jax.steps.outcome import StepOutput, remembering, sample_rows, standing
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

    The first `draft_lens[s]` of a row are drafts; a run ends at the first of `state.sampling.stop_ids`. What rejected
    drafts wrote to the pool lies past `seq_len` and is never read. Blocks for `draft_lens + 1` more tokens must be in
    the table.
    """
    batch = uniform_batch(state, drafts, draft_lens, model.layout.block_size)
    hidden, pool = run_target(model, params, pool, batch)
    state, out = judged(model, params, state, hidden, Drafts(drafts, draft_lens), num_logprobs)
    return pool, state, out


def judged(
    model: Model,
    params: DecoderParams,
    state: SequenceState,
    hidden: Float[Array, "R D"],
    drafts: Drafts,
    num_logprobs: int = 0,
) -> tuple[SequenceState, StepOutput]:
    """State and output after the drafts were judged by the hidden rows of the target's run over them."""
    width = drafts.tokens.shape[1] + 1
    logits = head_logits(model, params, hidden, jnp.arange(hidden.shape[0], dtype=jnp.int32))
    positions = state.seq_len[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)
    active = state.seq_len > 0
    # Each drafted position looks back on the drafts before it; what was drawn instead then takes their place.
    state = remembering(state, positions[:, :-1], drafts.tokens, active)
    out = sample_rows(logits, state.sampling, positions, num_logprobs, drafts, model.acceptance)
    state = remembering(state, positions, out.tokens, active)
    accepted = up_to_an_end(out.num_tokens - 1, out.tokens, state.sampling.stop_ids)
    last = jnp.take_along_axis(out.tokens, accepted[:, None], axis=1)[:, 0]
    state = state.replace(
        seq_len=jnp.where(active, state.seq_len + accepted + 1, 0),
        last_token=jnp.where(active, last, state.last_token),
    )
    return state, standing(out, jnp.where(active, accepted + 1, 0), drafts.lens)


def up_to_an_end(accepted: Int[Array, " S"], tokens: Int[Array, "S Q"], ends: Int[Array, "S E"]) -> Int[Array, " S"]:
    """`accepted`, or fewer: the drafts before the first token that ends an answer, which then is the row's last."""
    is_end = jnp.any(tokens[:, :, None] == ends[:, None, :], axis=-1)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(is_end, offset, tokens.shape[1]), axis=1)
    return jnp.minimum(accepted, first)
