# SPDX-License-Identifier: Apache-2.0
"""Probe: the residual stream of a chunk's tokens between layers, and what the head would make of it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.layers.norm import rms_norm
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch
from metrale_jax.steps.outcome import remembering_chunks
from metrale_jax.steps.target import run_probed


def probe(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S"],
    captures: tuple[int, ...] = (),
) -> tuple[Pool, SequenceState, tuple[Float[Array, "T D"], ...]]:
    """Pool and state as after `score`, and the residual stream's rows after so many layers as each of `captures` says:
    0 are the embeddings, and the number of layers what the final norm gets. Rows of padding mean nothing."""
    batch = ragged_batch(state, tokens, lengths, model.layout.block_size)
    _, pool, rows = run_probed(model, params, pool, batch, captures)
    state = remembering_chunks(state, tokens, lengths)
    return pool, state.replace(seq_len=state.seq_len + lengths), rows


def lens(model: Model, params: DecoderParams, rows: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Float32 logits of rows of the residual stream, as if no layer came after them: final norm and head
    (nostalgebraist 2020)."""
    hidden = rms_norm(rows, params.final_norm, model.config.norm_eps)
    return head_logits(model, params, hidden, jnp.arange(rows.shape[0], dtype=jnp.int32))
