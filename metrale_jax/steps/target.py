# SPDX-License-Identifier: Apache-2.0
"""The target's pass over a step, with its proposer kept in step: whatever the target runs, the drafter takes in."""

from jaxtyping import Array, Float

from metrale_jax.core.batch import TokenBatch
from metrale_jax.models.decoder import DecoderParams, Model, forward, forward_probed
from metrale_jax.state.pool import Pool


def run_target(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    """Final hidden rows of every token of `batch`, and the pool after the model and its proposer took it in."""
    proposer = model.proposer
    if proposer is None:
        return forward(model, params, pool, batch)
    hidden, pool, captured = forward_probed(model, params, pool, batch, proposer.captures)
    return hidden, proposer.observe(model, params, pool, batch, hidden, captured)
