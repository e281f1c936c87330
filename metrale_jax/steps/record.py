# SPDX-License-Identifier: Apache-2.0
"""Record: what a model computes for every token of a chunk, for whoever learns from it."""

from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, forward_probed
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch


def record(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S"],
    captures: tuple[int, ...] = (),
) -> tuple[Pool, SequenceState, tuple[Float[Array, "T D"], ...]]:
    """Pool and state as after `prefill`, and rows of every token: final hidden rows, then the residual stream's at each
    of `captures`. A proposer takes in nothing of it; rows of padding mean nothing."""
    batch = ragged_batch(state, tokens, lengths, model.layout.block_size)
    hidden, pool, captured = forward_probed(model, params, pool, batch, captures)
    return pool, state.replace(seq_len=state.seq_len + lengths), (hidden, *captured)
