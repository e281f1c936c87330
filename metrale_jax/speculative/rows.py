# SPDX-License-Identifier: Apache-2.0
"""Which slot and place each token of a step belongs to, for proposers that carry something from step to step."""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from metrale_jax.core.batch import Segment, TokenBatch


class TokenRows(NamedTuple):
    """Of each of `T` flat tokens: the `slots` of its sequence, its `offsets` from the first token that the sequence has
    in the step, the sequence's length before it (`starts`), and whether it is `real` and no padding."""

    slots: Int[Array, " T"]
    offsets: Int[Array, " T"]
    starts: Int[Array, " T"]
    real: Bool[Array, " T"]


def token_rows(batch: TokenBatch) -> TokenRows:
    """The rows of all tokens of a step, in order."""
    parts = [_of_segment(segment) for segment in batch.segments]
    return TokenRows(*(jnp.concatenate(column) for column in zip(*parts, strict=True)))


def _of_segment(segment: Segment) -> TokenRows:
    rows = segment.state
    index = jnp.arange(segment.num_tokens, dtype=jnp.int32)
    if segment.uniform:
        owner = index // rows.max_query_len
    else:
        # Empty rows begin where the next one does, and own nothing.
        begun = (index[:, None] >= rows.query_starts) & (rows.query_lens > 0)
        places = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
        owner = jnp.max(jnp.where(begun, places, 0), axis=1)
    offsets = index - rows.query_starts[owner]
    real = (offsets >= 0) & (offsets < rows.query_lens[owner])
    slots, starts = (jnp.where(real, leaf[owner], 0) for leaf in (rows.slots, rows.starts))
    return TokenRows(slots, jnp.where(real, offsets, 0), starts, real)


def segment_batches(batch: TokenBatch) -> Iterator[TokenBatch]:
    """A batch of each segment."""
    start = 0
    for segment in batch.segments:
        own = slice(start, start + segment.num_tokens)
        start += segment.num_tokens
        flat = batch.tokens[own], batch.positions[own], batch.rope_lens[own]
        yield TokenBatch(*flat, tuple(slots[own] for slots in batch.slots), (segment,))
