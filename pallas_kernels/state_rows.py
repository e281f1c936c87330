# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a step keep recurrent state, and ragged chunks cut for scans over them.

State lies in slots stacked by layer, `[L, U, ...]`. Slot 0 belongs to padding: it may be read and written, and nothing
that is read of it is ever part of a result. Beside its state a slot has up to `J` pending rows: the inputs of tokens
that were run and not yet known to stand. A step folds those that were accepted into the state before its own tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from pallas_kernels.shapes import ceil_div

# Tokens that a scan takes in at once.
CHUNK = 64
# How slots are read and written: they are always there.
IN_BOUNDS = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


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


def begun(storage: Any, layer, rows: StateRows) -> Any:
    """The storage, a tree of `[L, U, ...]`, with zeros in the slots of rows whose sequences begin.

    What reads the rest of a step's states reads them of this, so that the storage itself has this one use: where a
    function both reads and overwrites what it is handed, XLA's CPU compiler may copy all of it.
    """

    def begin(leaf):
        slots = jnp.where(rows.starts > 0, leaf.shape[1], rows.slots)
        empty = jnp.zeros((len(slots), *leaf.shape[2:]), leaf.dtype)
        return leaf.at[layer, slots].set(empty, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(begin, storage)


def waiting_rows(pending: Any, layer, rows: StateRows) -> Any:
    """What waits in each row's slot: `[S, J, ...]` of each array `[L, U, J, ...]` of the tree, zeros if nothing waits
    in any. `()` stays `()`."""
    if isinstance(pending, tuple):
        return ()

    # A branch, so that all of it is read at once and before `stored_rows` writes: of storage that may be read after it
    # is written compilers make a copy.
    def read():
        return jax.tree.map(lambda leaf: leaf.at[layer, rows.slots].get(**IN_BOUNDS), pending)

    def nothing():
        shapes = jax.eval_shape(read)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.lax.cond(jnp.any(rows.num_pending > 0), read, nothing)


def stored_rows(pending: Any, waiting: Any, new: Any, layer, rows: StateRows) -> Any:
    """The storage with `new [S, R - 1, ...]` waiting instead of what was read as `waiting`, as far as a row drafts."""
    if rows.max_query_len == 1:
        return pending
    count = rows.max_query_len - 1
    drafted = jnp.arange(count, dtype=jnp.int32) < rows.query_lens[:, None] - 1

    def store(leaf, before, after):
        mask = drafted.reshape(*drafted.shape, *(1,) * (after.ndim - 2))
        kept = jnp.where(mask, after.astype(leaf.dtype), before[:, :count])
        return leaf.at[layer, rows.slots, :count].set(kept, **IN_BOUNDS)

    return jax.tree.map(store, pending, waiting, new)


def offsets_in_rows(rows: StateRows, num_tokens: int) -> Int[Array, " T"]:
    """How far into its sequence's new tokens each flat token of ragged rows is. Padding counts on from a sequence."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    begun = (rows.query_lens > 0) & (rows.query_starts <= token[:, None])
    return token - jnp.max(jnp.where(begun, rows.query_starts, 0), axis=1)


def flat_index(chunks: Chunks, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """For each flat token the chunk it is in and its place there: the inverse of `Chunks.token_index`. A token of
    padding is at place 0 of some chunk; callers mask it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    inside = (token[:, None] >= chunks.token_starts) & (token[:, None] < chunks.token_starts + chunks.lens)
    chunk = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return chunk, jnp.where(inside.any(axis=1), token - chunks.token_starts[chunk], 0)


def cut_out(x: Array, index: Int[Array, "*n"]) -> Array:
    """`x [T, ...]` at the flat tokens `index`, `[*n, ...]`; zeros where that is past the last of them.

    Whole rows are gathered: of arrays of more axes libtpu's compiler for v7x makes so deep a program that it overflows
    its own stack.
    """
    flat = x.reshape(x.shape[0], -1).at[index.reshape(-1)].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return flat.reshape(*index.shape, *x.shape[1:])
