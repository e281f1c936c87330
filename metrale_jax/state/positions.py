# SPDX-License-Identifier: Apache-2.0
"""Positions are truth: what the state in each slot has taken in, against where its sequence stands."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from metrale_jax.core.batch import Segment, TokenBatch
from metrale_jax.core.errors import ConfigError
from pallas_kernels.state_rows import CHUNK, cut_chunks


def located(batch: TokenBatch, positions: Int[Array, " U"], most_pending: int) -> TokenBatch:
    """The batch whose rows know how much is pending in their slots, and are cut for scans where they are ragged.

    Raises `ConfigError` for rows of more drafts than a slot can hold.
    """
    drafts = max((one.state.max_query_len - 1 for one in batch.segments if one.uniform), default=0)
    if drafts > most_pending:
        raise ConfigError(
            f"{drafts} drafts a row are above the {most_pending} pending tokens that recurrent state is kept with; "
            "draft fewer, or make the model with a higher num_pending."
        )

    def rows(segment: Segment):
        state = segment.state
        pending = jnp.where(state.starts > 0, state.starts - positions.at[state.slots].get(mode="clip"), 0)
        state = state.replace(num_pending=pending)
        return state if segment.uniform else state.replace(chunks=cut_chunks(state, segment.num_tokens, CHUNK))

    return batch.replace(segments=tuple(replace(one, state=rows(one)) for one in batch.segments))


def misplaced(batch: TokenBatch, most_pending: int) -> Bool[Array, " T"]:
    """Tokens of located sequences whose state is not where they stand: further on, or too far behind for what a slot
    can have pending. What comes of them must not pass for an answer."""
    found = []
    for segment in batch.segments:
        rows = segment.state
        wrong = (rows.query_lens > 0) & ((rows.num_pending < 0) | (rows.num_pending > most_pending))
        token = jnp.arange(segment.num_tokens, dtype=jnp.int32)[:, None]
        inside = (token >= rows.query_starts) & (token < rows.query_starts + rows.query_lens)
        found.append(jnp.any(inside & wrong, axis=1))
    return jnp.concatenate(found)


def advanced(positions: Int[Array, " U"], batch: TokenBatch) -> Int[Array, " U"]:
    """Positions after the step: of equal rows only the first token is taken in, the others wait."""
    for segment in batch.segments:
        rows = segment.state
        taken = jnp.minimum(rows.query_lens, 1) if segment.uniform else rows.query_lens
        positions = positions.at[rows.slots].set(rows.starts + taken, mode="promise_in_bounds")
    return positions
