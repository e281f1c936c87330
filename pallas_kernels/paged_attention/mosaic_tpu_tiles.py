# SPDX-License-Identifier: Apache-2.0
"""Tiles of the past on a TPU: from the pool into VMEM, block by block, and from there to rows of one head.

A tile lies in VMEM as in the pool, `[tokens, K, H]` or `[tokens, H]` of one head, the heads of narrow formats beside
each other in words of 32 bits. A head's rows are loaded from it with a stride, shifted out of their words, and only
then decoded; where such loads do not exist, the whole tile is turned to `[K, tokens, H]`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_formats.format import KvFormat
from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.mosaic_tpu_sizes import LANES, TURNED_TOKENS, Tiling, held, tile_shape
from pallas_kernels.paged_attention.op import AttentionParams

# Blocks whose copies are started in one turn of a loop, so that the instructions of several overlap.
BLOCKS_AT_A_TIME = 4


class Numbers(NamedTuple):
    """Known to the scalar core before the kernel starts. `[1]` the layer; of each row `[S]`: its lengths, the first
    block that it may see, how many tiles all rows before it walk, and the next row that walks any (S if none)."""

    layer: Any
    kv_lens: Any
    query_lens: Any
    first_block: Any
    tiles_before: Any
    next_row: Any


class Arrays(NamedTuple):
    """The kernel's inputs, `()` where there is none. Of the row, in SMEM: its blocks `[1, 1, M]`, those of the next
    row, the bits of its tree `[1, 1, Q]`. In VMEM: the sinks in base 2 `[groups, rows, 1]`, its query rows
    `[1, groups, rows, H]`. The pages as they lie in the pool; scales of heads `[L, K]` in SMEM."""

    table: Any
    next_table: Any
    tree: Any
    sinks: Any
    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class Scratch(NamedTuple):
    """Two tiles each of codes `[2, tokens, K, H]` (see `tile_shape`) and of scales `[2, blocks, K, B]` as they arrive;
    one tile turned and decoded, `[K, tokens, H]`, where heads are not used straight from the codes; its scales
    `[K, 1, tokens]`; the running sums `[groups, rows, Hv]` and `[groups, rows, 128]`, the latter the same in all lanes;
    a semaphore for each of the two.
    """

    k_codes: Any
    v_codes: Any
    k_scales: Any
    v_scales: Any
    k: Any
    v: Any
    k_factors: Any
    v_factors: Any
    weighted: Any
    highest: Any
    total: Any
    arrived: Any


@dataclass(frozen=True)
class Call:
    """The static facts of a call. `views` says that a reference can be looked at in other shapes and dtypes, which the
    interpreter that finds races does not know."""

    tiling: Tiling
    params: AttentionParams
    kv_format: KvFormat
    dtype: Any
    scale_per_row: bool
    views: bool


def scratch_of(call: Call, pages: KvPages) -> Scratch:
    """The scratch memory of the call."""
    tiling = call.tiling
    tokens, heads = tiling.tile_tokens, tiling.num_kv_heads
    widths = [codes.shape[-1] for codes in held(pages)]

    def of_each(make):
        """For keys and for values, which have nothing where they are a part of the keys."""
        return ([make(width) for width in widths] + [()])[:2]

    def scaled(shape):
        return of_each(lambda _: pltpu.VMEM(shape, jnp.float32) if call.scale_per_row else ())

    codes = of_each(lambda width: pltpu.VMEM((2, *tile_shape(tokens, heads, width)), pages.k.dtype))
    scales = scaled((2, tiling.tile_blocks, heads, tiling.block_size))
    turned = of_each(lambda width: () if tiling.direct else pltpu.VMEM((heads, tokens, width), call.dtype))
    factors = scaled((heads, 1, tokens))
    column = pltpu.VMEM((tiling.num_groups, tiling.rows, LANES), jnp.float32)
    weighted = pltpu.VMEM((tiling.num_groups, tiling.rows, tiling.v_dim), jnp.float32)
    semaphores = pltpu.SemaphoreType.DMA((2,))
    return Scratch(*codes, *scales, *turned, *factors, weighted, column, column, semaphores)


@dataclass(frozen=True)
class Tiles:
    """The tiles of one call. `half` says which half of the buffers a tile is in."""

    call: Call
    numbers: Numbers
    arrays: Arrays
    scratch: Scratch

    def num_tiles(self, row):
        """How many tiles the row walks."""
        tile_blocks = self.call.tiling.tile_blocks
        tiles = jax.lax.div(self._num_blocks(row) + tile_blocks - 1, tile_blocks)
        return jnp.where(self.numbers.kv_lens[row] > 0, tiles, 0)

    def _num_blocks(self, row):
        """How many blocks the row reads."""
        size = self.call.tiling.block_size
        return jax.lax.div(self.numbers.kv_lens[row] + size - 1, size) - self.numbers.first_block[row]

    def _blocks_in(self, row, tile):
        return jnp.minimum(self._num_blocks(row) - tile * self.call.tiling.tile_blocks, self.call.tiling.tile_blocks)

    def _copies(self, block, index, half):
        """The copies of one block of the pool to its place in a tile."""
        size, layer = self.call.tiling.block_size, self.numbers.layer[0]
        place = pl.ds(index * size, size)
        arrays, scratch = self.arrays, self.scratch
        pairs = [(arrays.k, scratch.k_codes, place), (arrays.v, scratch.v_codes, place)][: self._num_held]
        if self.call.scale_per_row:
            scales = [(arrays.k_scale, scratch.k_scales, index), (arrays.v_scale, scratch.v_scales, index)]
            pairs += scales[: self._num_held]
        return [
            pltpu.make_async_copy(source.at[layer, block], target.at[half, where], scratch.arrived.at[half])
            for source, target, where in pairs
        ]

    @property
    def _num_held(self) -> int:
        """Of keys and values, how many lie in the pool."""
        return 1 if self.call.params.latent else 2

    def fetch(self, table, row, tile, half):
        """Starts the copies of a tile of `row`, whose blocks are in `table`."""
        begin = self.numbers.first_block[row] + tile * self.call.tiling.tile_blocks

        def start(index):
            for copy in self._copies(table[0, 0, begin + index], index, half):
                copy.start()

        _some_at_a_time(self._blocks_in(row, tile), start)

    def wait_for(self, row, tile, half):
        """Returns once the tile has arrived."""
        scratch, blocks = self.scratch, self._blocks_in(row, tile)
        buffers = [scratch.k_codes, scratch.v_codes][: self._num_held]
        if self.call.scale_per_row:
            buffers += [scratch.k_scales, scratch.v_scales][: self._num_held]

        # A semaphore counts bytes: one wait for a whole tile of each.
        @pl.when(blocks == self.call.tiling.tile_blocks)
        def _():
            for buffer in buffers:
                pltpu.make_async_copy(buffer.at[half], buffer.at[half], scratch.arrived.at[half]).wait()

        @pl.when(blocks < self.call.tiling.tile_blocks)
        def _():
            def wait(index):
                for copy in self._copies(0, index, half):
                    copy.wait()

            _some_at_a_time(blocks, wait)

    def prepare(self, half, needed):
        """Puts what is not used straight from the tile where it can be picked by head."""
        scratch, tiling = self.scratch, self.call.tiling
        if not tiling.direct:
            pairs = ((scratch.k_codes, scratch.k), (scratch.v_codes, scratch.v))
            for codes, turned in pairs[: self._num_held]:
                self._turn(codes, half, turned)
        if self.call.scale_per_row:
            pairs = ((scratch.k_scales, scratch.k_factors), (scratch.v_scales, scratch.v_factors))
            for scales, factors in pairs[: self._num_held]:
                by_head = jnp.swapaxes(scales[half], 0, 1).reshape(tiling.num_kv_heads, tiling.tile_tokens)
                factors[...] = jnp.where(needed, by_head, 0.0)[:, None]

    def _turn(self, codes, half, turned):
        decode, tokens = self.call.kv_format.decode, self.call.tiling.tile_tokens
        if self.call.tiling.strided:
            for head in range(self.call.tiling.num_kv_heads):
                turned[head] = decode(self._codes(codes, half, head), self.call.dtype)
            return
        for begin in range(0, tokens, TURNED_TOKENS):
            part = pl.ds(begin, min(TURNED_TOKENS, tokens - begin))
            turned[:, part] = decode(jnp.swapaxes(codes[half, part], 0, 1), self.call.dtype)

    def keys(self, half, head):
        """One head's keys of a tile, `[tokens, H]`."""
        if not self.call.tiling.direct:
            return self.scratch.k[head]
        return self.call.kv_format.decode(self._codes(self.scratch.k_codes, half, head), self.call.dtype)

    def values(self, half, head, needed):
        """One head's values of a tile, `[tokens, Hv]`, zero where nobody owns any."""
        latent = self.call.params.latent
        if latent:
            values = self.keys(half, head)[:, :latent]
        elif not self.call.tiling.direct:
            values = self.scratch.v[head]
        else:
            values = self.call.kv_format.decode(self._codes(self.scratch.v_codes, half, head), self.call.dtype)
        return jnp.where(needed, values, jnp.zeros((), values.dtype))

    def _codes(self, codes, half, head):
        """One head's codes, `[tokens, H]`, by loads of every so many rows. Those of several heads share a word."""
        if self.call.tiling.num_kv_heads == 1:
            return codes[half]
        tokens, heads, width = codes.shape[1:]
        in_word = 4 // codes.dtype.itemsize
        word, place = divmod(head, in_word)
        stride = heads // in_word
        if self.call.views:
            words = codes.at[half] if in_word == 1 else codes.at[half].bitcast(jnp.int32)
            words = words.reshape(tokens * stride, width)[pl.ds(word, tokens, stride=stride)]
        else:
            words = codes[half].reshape(tokens * heads, width)
            words = (words if in_word == 1 else pltpu.bitcast(words, jnp.int32))[word::stride]
        if in_word == 1:
            return words
        bits = 32 // in_word
        shifted = jax.lax.shift_right_logical(words, jnp.int32(place * bits))
        return jax.lax.bitcast_convert_type(shifted.astype(f"int{bits}"), codes.dtype)

    def scale_of_keys(self, head):
        """The scales of one head's keys, `[1, tokens]` or one number; zero where nobody owns any."""
        if self.call.scale_per_row:
            return self.scratch.k_factors[head]
        return self.arrays.k_scale[self.numbers.layer[0], head]

    def scale_of_values(self, head):
        """The same of its values."""
        if self.call.params.latent:
            return self.scale_of_keys(head)
        if self.call.scale_per_row:
            return self.scratch.v_factors[head]
        return self.arrays.v_scale[self.numbers.layer[0], head]


def _some_at_a_time(count, body):
    """`body(index)` for each index below `count`: in a loop of several, and one of the rest behind it."""

    def several(step, carry):
        for index in range(BLOCKS_AT_A_TIME):
            body(step * BLOCKS_AT_A_TIME + index)
        return carry

    def one(index, carry):
        body(index)
        return carry

    steps = jax.lax.div(count, jnp.int32(BLOCKS_AT_A_TIME))
    jax.lax.fori_loop(0, steps, several, None)
    jax.lax.fori_loop(steps * BLOCKS_AT_A_TIME, count, one, None)
