# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a step keep recurrent state, and ragged chunks cut for scans over them.

State lies in slots stacked by layer, `[L, U, ...]`. Slot 0 belongs to padding: it may be read and written, and nothing
that is read of it is ever part of a result. Beside its state a slot has up to `J` pending rows: the inputs of tokens
that were run and not yet known to stand. A step folds those that were accepted into the state before its own tokens.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from pallas_kernels.shapes import ceil_div

# Tokens that a scan takes in at once.
CHUNK = 64


@struct.dataclass
class StateRows:
    """The sequences of a step. All int32 `[S]`.

    `slots`: the slot of each. `starts`: how many tokens each had taken in before this step; where that is 0 its state
    begins as zeros, whatever the slot holds. `query_lens` counts its new tokens, which lie from `query_starts` on in a
    flat step; a length of 0 is padding. `num_pending` of the slot's pending rows come before the new tokens.

    Of equal rows `max_query_len` is the width. Their first token stands and is taken into the state; the others become
    the pending rows. Every token of ragged rows stands, and leaves nothing pending.
    `chunks` is what `cut_chunks` makes of ragged rows, so that layers need not each do it, or `()`.
    """

    slots: Any
    starts: Any
    query_lens: Any
    query_starts: Any
    num_pending: Any
    max_query_len: int = struct.field(pytree_node=False)
    chunks: Any = ()


@struct.dataclass
class Chunks:
    """Runs of at most `size` consecutive tokens of one sequence each, in order; padding after the last of them.

    int32 `[N]`: `rows`, the sequence that each belongs to; `token_starts` in the flat step; `lens`, 0 for padding. bool
    `[N]`: `first` and `last` of their sequences.
    """

    rows: Any
    token_starts: Any
    lens: Any
    first: Any
    last: Any
    size: int = struct.field(pytree_node=False)

    def token_index(self, num_tokens: int) -> Int[Array, "N C"]:
        """The flat token at each place of each chunk; `num_tokens`, one past the last, where there is none."""
        offset = jnp.arange(self.size, dtype=jnp.int32)
        index = self.token_starts[:, None] + offset
        return jnp.where(offset < self.lens[:, None], index, num_tokens)


def cut_chunks(rows: StateRows, num_tokens: int, size: int) -> Chunks:
    """The ragged tokens of a step of `num_tokens`, cut where a sequence's own position is a multiple of `size`.

    So a prompt is cut at the same places however it was split among steps, if those splits are at multiples too. There
    are `num_tokens / size + 2 S` chunks.
    """
    num_sequences = rows.starts.shape[0]
    count = ceil_div(num_tokens, size) + 2 * num_sequences
    ends = rows.starts + rows.query_lens
    first_cell = rows.starts // size
    each = jnp.where(rows.query_lens > 0, (ends + size - 1) // size - first_cell, 0)
    after = jnp.cumsum(each)
    index = jnp.arange(count, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(index[:, None] >= after, axis=1, dtype=jnp.int32), num_sequences - 1)
    number = index - (after - each)[owner]
    real = index < after[-1]
    cell = first_cell[owner] + number
    begin = jnp.maximum(cell * size, rows.starts[owner])
    stop = jnp.minimum((cell + 1) * size, ends[owner])
    return Chunks(
        rows=jnp.where(real, owner, 0),
        token_starts=jnp.where(real, rows.query_starts[owner] + begin - rows.starts[owner], num_tokens),
        lens=jnp.where(real, stop - begin, 0),
        first=real & (number == 0),
        last=real & (number == each[owner] - 1),
        size=size,
    )


def flat_index(chunks: Chunks, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """For each flat token the chunk it is in and its place there: the inverse of `Chunks.token_index`. A token of
    padding is at place 0 of some chunk; callers mask it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    inside = (token[:, None] >= chunks.token_starts) & (token[:, None] < chunks.token_starts + chunks.lens)
    chunk = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return chunk, jnp.where(inside.any(axis=1), token - chunks.token_starts[chunk], 0)
