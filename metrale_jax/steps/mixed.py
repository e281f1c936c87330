# SPDX-License-Identifier: Apache-2.0
"""Mixed: one pass over the weights that decodes some sequences and prefills chunks of others."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.batch import concatenate
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import Drafts
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch, uniform_batch
from metrale_jax.steps.outcome import StepOutput, remembering_chunks
from metrale_jax.steps.prefill import after_prefill
from metrale_jax.steps.target import run_target
from metrale_jax.steps.verify import judged


def mixed(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    decode_state: SequenceState,
    prefill_state: SequenceState,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S2"],
    num_logprobs: int = 0,
) -> tuple[Pool, SequenceState, SequenceState, StepOutput, StepOutput]:
    """Pool, both states and both outputs, as `decode` and `prefill` would give them one after the other."""
    block_size = model.layout.block_size
    num_decoding = decode_state.seq_len.shape[0]
    none, zero = jnp.zeros((num_decoding, 0), jnp.int32), jnp.zeros(num_decoding, jnp.int32)
    decoding = uniform_batch(decode_state, none, zero, block_size)
    prefilling = ragged_batch(prefill_state, tokens, lengths, block_size)
    hidden, pool = run_target(model, params, pool, concatenate(decoding, prefilling))
    rows = hidden[:num_decoding]
    decode_state, decoded = judged(model, params, decode_state, rows, Drafts(none, zero), num_logprobs)
    chunks = hidden[num_decoding:]
    prefill_state = remembering_chunks(prefill_state, tokens, lengths)
    prefill_state, filled = after_prefill(model, params, prefill_state, chunks, lengths, num_logprobs)
    return pool, decode_state, prefill_state, decoded, filled
