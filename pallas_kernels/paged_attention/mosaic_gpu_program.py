# SPDX-License-Identifier: Apache-2.0
"""What a thread block of Hopper's prefill attention does: one warpgroup moves pages, two multiply.

The ring's barriers: a tile has *arrived* when all its pages have, and is *used* when both multiplying warpgroups are
done with it; only then is its place fetched into again. `turn` is for the multiplying two alone, who meet at it twice a
tile and so take turns at the tensor cores.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.op import AttentionParams

MASKED = -1e30
LOG2_E = math.log2(math.e)
# Queries a multiplying warpgroup holds, the rows of one `wgmma`; two of them make a program, which is a whole piece.
ROWS, WARPGROUPS = 64, 2
# The ring: tiles on their way or in use.
STAGES = 2
# Registers a thread of the warpgroups that multiply and of the one that moves, of 64 K a multiprocessor.
MULTIPLYING_REGISTERS, MOVING_REGISTERS = 240, 24


@dataclass(frozen=True)
class Call:
    """Static facts: `page_rows` tokens of a block are one fetch, `key_tile` tokens a tile."""

    params: AttentionParams
    group: int
    key_tile: int
    page_rows: int
    widths: tuple[int, int]
    sinks: bool
    interpret: bool


def thread_block(call: Call, *refs):
    """Attends with one head's queries of one piece; `refs` are the call's arguments, then its result."""
    # Tiles of eight rows of 128 bytes, swizzled: the layout in which `wgmma` reads shared memory.
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    dtype = refs[0].dtype
    pages_a_tile = call.key_tile // call.page_rows

    def tiles(*shape):
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def arrived():
        return plgpu.Barrier(num_arrivals=pages_a_tile, num_barriers=STAGES)

    def used():
        return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)

    pl.run_scoped(
        lambda *shared: _program(call, refs, _Shared(*shared)),
        tiles(WARPGROUPS, ROWS, call.widths[0]),
        tiles(WARPGROUPS, ROWS, call.widths[1]),
        tiles(STAGES, call.key_tile, call.widths[0]),
        tiles(STAGES, call.key_tile, call.widths[1]),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        arrived(),
        arrived(),
        used(),
        used(),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        collective_axes="warpgroup",
    )


@dataclass(frozen=True)
class _Shared:
    """What the warpgroups share: queries, outputs, the ring of tiles, and barriers for each."""

    q: Any
    out: Any
    k: Any
    v: Any
    q_arrived: Any
    k_arrived: Any
    v_arrived: Any
    k_used: Any
    v_used: Any
    turn: Any


@dataclass(frozen=True)
class _Span:
    """Of a piece: its first query's position, the tokens that any of its queries sees, and the tiles that hold them;
    from tile `all_begin` to before `all_end` each query sees all."""

    first: Any
    low: Any
    high: Any
    begin: Any
    end: Any
    all_begin: Any
    all_end: Any


def _span(call: Call, kv_len, query_len) -> _Span:
    first, size, window = kv_len - query_len, call.key_tile, call.params.window
    low = jnp.maximum(first - window + 1, 0) if window else jnp.int32(0)
    begin = jax.lax.div(low, jnp.int32(size))
    end = jax.lax.div(kv_len + size - 1, jnp.int32(size))
    all_low = jnp.maximum(first + query_len - window, 0) if window else jnp.int32(0)
    all_begin = jnp.minimum(jax.lax.div(all_low + size - 1, jnp.int32(size)), end) if window else begin
    all_end = jnp.clip(jax.lax.div(first + 1, jnp.int32(size)), all_begin, end)
    return _Span(first, low, kv_len, begin, end, all_begin, all_end)


def _program(call: Call, refs, shared: _Shared):
    q, k, v, layer, tables, kv_lens, query_lens, starts, *sinks, out = refs
    head, piece = jax.lax.axis_index("heads"), jax.lax.axis_index("pieces")
    warpgroup = jax.lax.axis_index("warpgroup")
    span = _span(call, kv_lens[piece], query_lens[piece])

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply():
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        start = starts[piece] + warpgroup * ROWS
        arrived = shared.q_arrived.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[pl.ds(start, ROWS), head], shared.q.at[warpgroup], arrived)
        plgpu.barrier_wait(arrived)
        _Multiplier(call, shared, span, warpgroup, sinks[0][head] if sinks else None).run()
        mine = out.at[piece, pl.ds(warpgroup * ROWS, ROWS), head]
        plgpu.copy_smem_to_gmem(shared.out.at[warpgroup], mine)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _move():
        plgpu.set_max_registers(MOVING_REGISTERS, action="decrease")
        _move_pages(call, shared, span, (k, v), layer[0], tables.at[piece], head)


def _move_pages(call: Call, shared: _Shared, span: _Span, pages, layer, table, head):
    """Has each tile's pages fetched as soon as its place in the ring is free."""
    kv_head = jax.lax.div(head, jnp.int32(call.group))
    block_size = pages[0].shape[2]

    @pl.loop(span.begin, span.end)
    def _tile(tile):
        step = tile - span.begin
        slot = jax.lax.rem(step, jnp.int32(STAGES))
        for ref, ring, arrived, used in (
            (pages[0], shared.k, shared.k_arrived, shared.k_used),
            (pages[1], shared.v, shared.v_arrived, shared.v_used),
        ):
            pl.when(step >= STAGES)(lambda used=used: plgpu.barrier_wait(used.at[slot]))
            for page in range(call.key_tile // call.page_rows):
                token = tile * call.key_tile + page * call.page_rows
                # The last tile may reach beyond the table; what it fetches there is not looked at.
                entry = jnp.minimum(jax.lax.div(token, jnp.int32(block_size)), table.shape[0] - 1)
                offset = jax.lax.rem(token, jnp.int32(block_size))
                plgpu.copy_gmem_to_smem(
                    ref.at[layer, table[entry], pl.ds(offset, call.page_rows), kv_head],
                    ring.at[slot, pl.ds(page * call.page_rows, call.page_rows)],
                    arrived.at[slot],
                )

    # What the last tiles' barriers have counted is seen by someone too, as a barrier has to be before it goes.
    for back in range(STAGES, 0, -1):
        step = span.end - span.begin - back

        @pl.when(step >= 0)
        def _drain(step=step):
            slot = jax.lax.rem(step, jnp.int32(STAGES))
            plgpu.barrier_wait(shared.k_used.at[slot])
            plgpu.barrier_wait(shared.v_used.at[slot])


class _Multiplier:
    """One warpgroup's running softmax of its queries over the tiles that the ring brings."""

    def __init__(self, call: Call, shared: _Shared, span: _Span, warpgroup, sink):
        self.call, self.shared, self.span, self.warpgroup, self.sink = call, shared, span, warpgroup, sink

    def run(self):
        """Leaves the outputs in shared memory."""
        span = self.span
        highest, total = self._column(MASKED), self._column(0.0)
        if self.sink is not None:
            # A sink is a logit seen before all others, whose value is zero.
            highest, total = self._column(self.sink * LOG2_E), self._column(1.0)
        weighted = self._spread(jnp.full((ROWS, self.call.widths[1]), 0.0, jnp.float32), plgpu.Layout.WGMMA)
        carry = weighted, highest, total
        # The second warpgroup begins once the first has had its turn at the tensor cores.
        pl.when(self.warpgroup == 1)(self._change_turns)
        if self.call.params.window:
            carry = jax.lax.fori_loop(span.begin, span.all_begin, partial(self._tile, True), carry)
        carry = jax.lax.fori_loop(span.all_begin, span.all_end, partial(self._tile, False), carry)
        weighted, _, total = jax.lax.fori_loop(span.all_end, span.end, partial(self._tile, True), carry)
        pl.when(self.warpgroup == 0)(self._change_turns)
        inverse = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        found = weighted * jax.lax.broadcast_in_dim(inverse, weighted.shape, [0])
        self.shared.out.at[self.warpgroup][...] = found.astype(self.shared.out.dtype)
        plgpu.commit_smem()

    def _column(self, value):
        return self._spread(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    def _spread(self, array, layout):
        # Interpretation knows nothing of how threads share an array.
        return array if self.call.interpret else plgpu.layout_cast(array, layout)

    def _count(self, shape, axis):
        if self.call.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def _change_turns(self):
        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.turn)

    def _tile(self, masked: bool, tile, carry):
        weighted, highest, total = carry
        shared, params = self.shared, self.call.params
        slot = jax.lax.rem(tile - self.span.begin, jnp.int32(STAGES))
        logits = self._logits(slot)
        if params.softcap:
            power = jnp.exp2(logits * (2 * LOG2_E * params.scale / params.softcap))
            logits = (params.softcap * LOG2_E) * (1 - 2 / (power + 1))
        else:
            logits *= params.scale * LOG2_E
        if masked:
            logits = jnp.where(self._seen(tile), logits, MASKED)
        new = jnp.maximum(highest, logits.max(axis=1))
        old = jnp.exp2(highest - new)
        weights = jnp.exp2(logits - jax.lax.broadcast_in_dim(new, logits.shape, [0]))
        total = total * old + weights.sum(axis=1)
        codes = weights.astype(shared.v.dtype)
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.v_arrived.at[slot])
        if masked:
            self._clear_unowned(slot, tile)
        plgpu.barrier_wait(shared.turn)
        found = self._weighted(codes, slot)
        return weighted * jax.lax.broadcast_in_dim(old, weighted.shape, [0]) + found, new, total

    def _weighted(self, codes, slot):
        def multiply(sums):
            plgpu.wgmma(sums, codes, self.shared.v.at[slot])
            return sums[...]

        if self.call.interpret:
            found = jnp.dot(codes, self.shared.v.at[slot][...], preferred_element_type=jnp.float32)
        else:
            found = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.call.widths[1]), jnp.float32))
        plgpu.barrier_arrive(self.shared.v_used.at[slot])
        return found

    def _logits(self, slot):
        shared = self.shared
        plgpu.barrier_wait(shared.k_arrived.at[slot])

        def multiply(sums):
            plgpu.wgmma(sums, shared.q.at[self.warpgroup], plgpu.transpose_ref(shared.k.at[slot], (1, 0)))
            self._change_turns()
            return sums[...]

        if self.call.interpret:
            # Interpreted products take no transposed operands, nor ones in registers.
            q, k = shared.q.at[self.warpgroup][...], shared.k.at[slot][...]
            logits = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            self._change_turns()
        else:
            logits = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.call.key_tile), jnp.float32))
        plgpu.barrier_arrive(shared.k_used.at[slot])
        return logits

    def _seen(self, tile):
        """Which queries see which tokens of a tile, `[ROWS, key_tile]`."""
        shape = ROWS, self.call.key_tile
        query, token = (self._count(shape, axis) for axis in (0, 1))
        query += self.span.first + self.warpgroup * ROWS
        token += tile * self.call.key_tile
        seen = token <= query
        if self.call.params.window:
            seen &= token > query - self.call.params.window
        return seen

    def _clear_unowned(self, slot, tile):
        """Zeroes values that no query sees: they may be NaN, and nothing times NaN is NaN. Both warpgroups do it, each
        before its own product, and write the same."""
        shape = ROWS, self.call.widths[1]
        for begin in range(0, self.call.key_tile, ROWS):
            values = self.shared.v.at[slot, pl.ds(begin, ROWS)]
            token = self._count(shape, 0) + (tile * self.call.key_tile + begin)
            owned = (token >= self.span.low) & (token < self.span.high)
            values[...] = jnp.where(owned, values[...], jnp.zeros((), values.dtype))
        plgpu.commit_smem()
