# SPDX-License-Identifier: Apache-2.0
"""From states to the `TokenBatch` of a step."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.batch import Segment, TokenBatch
from metrale_jax.core.sequence import SequenceState
from pallas_kernels.paged_attention.op import SequenceRows, by_length, cut_pieces
from pallas_kernels.state_rows import StateRows


def ragged_batch(
    state: SequenceState, tokens: Int[Array, " T"], lengths: Int[Array, " S"], block_size: int
) -> TokenBatch:
    """`lengths[s]` new tokens for each sequence, laid end to end in `tokens`; what is left of `tokens` is padding."""
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), lengths.shape[0] - 1)
    real = index < ends[-1]
    positions = jnp.where(real, state.seq_len[owner] + index - starts[owner], 0)
    return TokenBatch(
        tokens=jnp.where(real, tokens, 0),
        positions=positions,
        rope_lens=jnp.maximum(state.prompt_len[owner], positions + 1),
        slots=_slots(state, owner, positions, real, block_size),
        segments=(_segment(state, lengths, starts, tokens.shape[0], 0, uniform=False),),
    )


def uniform_batch(
    state: SequenceState, drafts: Int[Array, "S J"], draft_lens: Int[Array, " S"], block_size: int
) -> TokenBatch:
    """Each sequence's last token and its drafts: `J + 1` tokens a row. Empty rows are padding throughout."""
    num_sequences, width = drafts.shape[0], drafts.shape[1] + 1
    lengths = jnp.where(state.seq_len > 0, draft_lens + 1, 0)
    offset = jnp.arange(width, dtype=jnp.int32)
    real = (offset < lengths[:, None]).reshape(-1)
    tokens = jnp.concatenate([state.last_token[:, None], drafts], axis=1).reshape(-1)
    positions = jnp.where(real, (state.seq_len[:, None] + offset).reshape(-1), 0)
    owner = jnp.repeat(jnp.arange(num_sequences, dtype=jnp.int32), width)
    starts = jnp.arange(num_sequences, dtype=jnp.int32) * width
    return TokenBatch(
        tokens=jnp.where(real, tokens, 0),
        positions=positions,
        rope_lens=jnp.maximum(state.prompt_len[owner], positions + 1),
        slots=_slots(state, owner, positions, real, block_size),
        segments=(_segment(state, lengths, starts, num_sequences * width, width, uniform=True),),
    )


def _slots(state, owner, positions, real, block_size):
    return tuple(
        jnp.where(real, table[owner, positions // block_size] * block_size + positions % block_size, 0)
        for table in state.block_tables
    )


def _segment(state, lengths, starts, num_tokens, max_query_len, uniform):
    kv_lens = jnp.where(lengths > 0, state.seq_len + lengths, 0)
    rows = tuple(SequenceRows(table, kv_lens, lengths, starts, max_query_len) for table in state.block_tables)
    rows = tuple(row.replace(pieces=by_length(row) if uniform else cut_pieces(row, num_tokens)) for row in rows)
    return Segment(rows, _state_rows(state, lengths, starts, max_query_len), num_tokens, uniform)


def _state_rows(state, lengths, starts, max_query_len):
    # How many rows are pending is told by the pool, which the forward pass has.
    slots = jnp.where(lengths > 0, state.recurrent_slot, 0)
    return StateRows(slots, state.seq_len, lengths, starts, jnp.zeros_like(lengths), max_query_len)
