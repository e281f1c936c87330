# SPDX-License-Identifier: Apache-2.0
"""Speculate: drafts made, verified and judged on the device, in one program or in the two that the host loop runs.

Whatever is drafted, the tokens that stand are those that the target itself draws: by the exact rule a draft is accepted
where it equals the token drawn with the noise of its position.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import Drafts, Wish
from metrale_jax.sampling.accept import acceptance_rule
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import uniform_batch
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.target import run_target
from metrale_jax.steps.verify import judged


def speculate(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    limits: Int[Array, " S"],
    num_drafts: int,
    num_logprobs: int = 0,
) -> tuple[Pool, SequenceState, StepOutput]:
    """What `verify` gives for up to `limits[s]` drafts by the model's proposer, at most `num_drafts` a row.

    A run ends at the first of `state.sampling.stop_ids`. Blocks for `limits + 1` more tokens
    must be in the table.
    """
    pool, hidden, drafts = draft_and_run(model, params, pool, state, limits, num_drafts)
    state, out = judged(model, params, state, hidden, drafts, num_logprobs)
    return pool, state, out


def draft_and_run(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    limits: Int[Array, " S"],
    num_drafts: int,
) -> tuple[Pool, Float[Array, "R D"], Drafts]:
    """The pool after each row's last token and its drafts were run, their final hidden rows `[S (J + 1), D]`, and the
    drafts, with what they were drawn from where the model's acceptance rule goes by that."""
    limits = jnp.where(state.seq_len > 0, jnp.minimum(limits, num_drafts), 0)
    wish = Wish(num_drafts, acceptance_rule(model.acceptance).needs_scores)
    drafts, pool = model.proposer.propose(model, params, pool, state, limits, wish)
    # Compilers would work the drafts out again for each use that is made of them.
    drafts = jax.lax.optimization_barrier(drafts.replace(lens=jnp.minimum(drafts.lens, limits)))
    batch = uniform_batch(state, drafts.tokens, drafts.lens, model.layout.block_size)
    hidden, pool = run_target(model, params, pool, batch)
    return pool, hidden, drafts
