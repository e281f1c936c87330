# SPDX-License-Identifier: Apache-2.0
"""The body of paged attention on a TPU.

A grid step is one row: a sequence's few new tokens, or a piece of a chunk. The row walks the blocks that it may see in
tiles, with a running softmax in float32 and base 2. While a tile is multiplied the next one is on its way from the
pool into the other half of the buffers; the last tile of a row fetches the first of the next row that has any, so that
short rows do not wait for memory either.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.mosaic_tpu_tiles import Arrays, Call, Numbers, Scratch, Tiles
from pallas_kernels.paged_attention.op import MAX_TREE

LOG2E = 1.4426950408889634
MASKED = -1e30


def body(call: Call, *refs) -> None:
    """Runs one grid step on the references of `Numbers`, of `Arrays`, of the result and of `Scratch`."""
    given = iter(refs)
    numbers, arrays = (kind(*(next(given) for _ in kind._fields)) for kind in (Numbers, Arrays))
    out, scratch = next(given), Scratch(*given)
    _Row(call, numbers, arrays, out, scratch).run()


class _Row:
    """One grid step."""

    def __init__(self, call, numbers, arrays, out, scratch):
        self.call, self.tiling, self.params = call, call.tiling, call.params
        self.tiles = Tiles(call, numbers, arrays, scratch)
        self.numbers, self.arrays, self.out, self.scratch = numbers, arrays, out, scratch
        self.row, self.num_rows = pl.program_id(0), pl.num_programs(0)
        self.kv_len, self.query_len = numbers.kv_lens[self.row], numbers.query_lens[self.row]
        # Positions of the first new token and of the oldest one that any query may see.
        self.first = self.kv_len - self.query_len
        self.oldest = jnp.maximum(self.first - self.params.window + 1, 0) if self.params.window else jnp.int32(0)

    def run(self):
        tiles = self.tiles.num_tiles(self.row)
        before, following = self.numbers.tiles_before[self.row], self.numbers.next_row[self.row]

        @pl.when(tiles == 0)
        def _():
            self.out[...] = jnp.zeros_like(self.out)

        @pl.when((tiles > 0) & (before == 0))
        def _():
            self.tiles.fetch(self.arrays.table, self.row, 0, 0)

        @pl.when(tiles > 0)
        def _():
            self._begin()

            def walk(tile, carry):
                half = jax.lax.rem(before + tile, 2)

                @pl.when(tile + 1 < tiles)
                def _():
                    self.tiles.fetch(self.arrays.table, self.row, tile + 1, 1 - half)

                @pl.when((tile + 1 == tiles) & (following < self.num_rows))
                def _():
                    self.tiles.fetch(self.arrays.next_table, following, 0, 1 - half)

                self.tiles.wait_for(self.row, tile, half)
                self._attend(tile, half)
                return carry

            jax.lax.fori_loop(0, tiles, walk, None)
            self._finish()

    # -- the running softmax

    def _begin(self):
        scratch, sinks = self.scratch, self.arrays.sinks
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)
        if isinstance(sinks, tuple):
            scratch.highest[...] = jnp.full_like(scratch.highest, MASKED)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            scratch.highest[...] = jnp.broadcast_to(sinks[...], scratch.highest.shape)
            scratch.total[...] = jnp.ones_like(scratch.total)

    def _attend(self, tile, half):
        start = (self.numbers.first_block[self.row] + tile * self.tiling.tile_blocks) * self.tiling.block_size
        seen = self._seen(start + jax.lax.broadcasted_iota(jnp.int32, (1, self.tiling.tile_tokens), 1))
        # What nobody owns may hold NaN, which zero weights would pass on.
        needed = self._needed(start, 0)
        self.tiles.prepare(half, self._needed(start, 1))
        if self.tiling.together:
            self._attend_together(half, seen, needed)
        else:
            jax.lax.fori_loop(
                0, self.tiling.num_kv_heads, lambda head, carry: self._attend_head(half, head, seen, needed), None
            )

    def _attend_together(self, half, seen, needed):
        """All heads' rows by each head's keys; a row keeps what its own head gave."""
        scratch, heads = self.scratch, range(self.tiling.num_kv_heads)
        q = self.arrays.q[0, 0].astype(self.call.dtype)
        logits = self._of_own_head([self._product(q, self.tiles.keys(half, head), ((1,), (1,))) for head in heads])
        if self.call.kv_format.scaled:
            logits = logits * self._of_own_head([self.tiles.scale_of_keys(head) for head in heads])
        weights, shrunk = self._weigh(0, logits, seen)
        if self.call.kv_format.scaled:
            weights = weights * self._of_own_head([self.tiles.scale_of_values(head) for head in heads])
        weights = weights.astype(self.call.dtype)
        values = (self.tiles.values(half, head, needed) for head in heads)
        mixed = self._of_own_head([self._product(weights, value, ((1,), (0,))) for value in values])
        scratch.weighted[0] = scratch.weighted[0] * shrunk[:, :1] + mixed

    def _of_own_head(self, results):
        """Each row of the result of its own head."""
        index = jax.lax.rem(self._row_index(), jnp.int32(self.tiling.span * self.tiling.group))
        head_of_row = jax.lax.div(index, jnp.int32(self.tiling.group))
        own = results[0]
        for head, result in enumerate(results[1:], 1):
            own = jnp.where(head_of_row == head, result, own)
        return own

    def _attend_head(self, half, head, seen, needed):
        """The rows of one head by its keys."""
        scratch = self.scratch
        q = self.arrays.q[0, head].astype(self.call.dtype)
        logits = self._product(q, self.tiles.keys(half, head), ((1,), (1,)))
        if self.call.kv_format.scaled:
            logits = logits * self.tiles.scale_of_keys(head)
        weights, shrunk = self._weigh(head, logits, seen)
        if self.call.kv_format.scaled:
            weights = weights * self.tiles.scale_of_values(head)
        mixed = self._product(weights.astype(self.call.dtype), self.tiles.values(half, head, needed), ((1,), (0,)))
        scratch.weighted[head] = scratch.weighted[head] * shrunk[:, :1] + mixed

    def _weigh(self, group, logits, seen):
        """The weights of a tile in a group's running softmax, and what earlier weights shrink by."""
        scratch, params = self.scratch, self.params
        if params.softcap:
            logits = jnp.tanh(logits * (params.scale / params.softcap)) * (params.softcap * LOG2E)
        else:
            logits = logits * (params.scale * LOG2E)
        logits = jnp.where(seen, logits, MASKED)
        before = scratch.highest[group]
        highest = jnp.maximum(before, jnp.max(logits, axis=-1, keepdims=True))
        weights, shrunk = jnp.exp2(logits - highest[:, :1]), jnp.exp2(before - highest)
        scratch.highest[group] = highest
        scratch.total[group] = scratch.total[group] * shrunk + jnp.sum(weights, axis=-1, keepdims=True)
        return weights, shrunk

    def _finish(self):
        used = self._query_of_row() < self.query_len
        result = self.scratch.weighted[...] / self.scratch.total[...][..., :1]
        self.out[0] = jnp.where(used, result, 0.0).astype(self.out.dtype)

    def _product(self, left, right, axes):
        exact = self.call.dtype == jnp.float32
        return jax.lax.dot_general(
            left,
            right,
            (axes, ((), ())),
            precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    # -- who sees what

    def _row_index(self):
        return jax.lax.broadcasted_iota(jnp.int32, (self.tiling.rows, 1), 0)

    def _query_of_row(self):
        """Which of the new tokens a query row belongs to, `[rows, 1]`."""
        return jax.lax.div(self._row_index(), jnp.int32(self.tiling.span * self.tiling.group))

    def _needed(self, start, axis):
        """Whether any query may see a token of the tile, a column (tokens along axis 0) or a row."""
        shape = (self.tiling.tile_tokens, 1) if axis == 0 else (1, self.tiling.tile_tokens)
        key = start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= self.oldest) & (key < self.kv_len)

    def _seen(self, key):
        """Which keys each query row sees, `[rows, tokens]`; unused rows may see any that are needed."""
        query = self._query_of_row()
        if isinstance(self.arrays.tree, tuple):
            depth = query
            seen = key <= jnp.minimum(self.first + query, self.kv_len - 1)
        else:
            bits = jnp.zeros_like(query)
            for index in range(self.tiling.query_len):
                bits = jnp.where(query == index, self.arrays.tree[0, 0, index], bits)
            depth = jax.lax.population_count(bits) - 1
            new = key - self.first
            place = jnp.broadcast_to(jnp.clip(new, 0, MAX_TREE - 1), (query.shape[0], key.shape[1]))
            bit = jax.lax.shift_right_logical(jnp.broadcast_to(bits, place.shape), place) & 1
            seen = ((new < 0) | (bit > 0)) & (key < self.kv_len)
        if self.params.window:
            seen &= key > self.first + depth - self.params.window
        return seen & (key >= self.oldest)
