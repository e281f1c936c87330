# SPDX-License-Identifier: Apache-2.0
"""The target's pass over a step, with its proposer kept in step: whatever the target runs, the drafter takes in."""

from jaxtyping import Array, Float

from metrale_jax.core.batch import TokenBatch
from metrale_jax.models.decoder import DecoderParams, Model, forward_probed
from metrale_jax.state.pool import Pool


def run_target(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    """Final hidden rows of every token of `batch`, and the pool after the model and its proposer took it in."""
    hidden, pool, _ = run_probed(model, params, pool, batch, ())
    return hidden, pool


def run_probed(
    model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, captures: tuple[int, ...]
) -> tuple[Float[Array, "T D"], Pool, tuple[Float[Array, "T D"], ...]]:
    """The same, and the residual stream's rows after so many layers as each of `captures` says."""
    proposer = model.proposer
    if proposer is None:
        return forward_probed(model, params, pool, batch, captures)
    hidden, pool, rows = forward_probed(model, params, pool, batch, (*captures, *proposer.captures))
    pool = proposer.observe(model, params, pool, batch, hidden, rows[len(captures) :])
    return hidden, pool, rows[: len(captures)]
