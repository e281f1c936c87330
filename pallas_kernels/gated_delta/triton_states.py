# SPDX-License-Identifier: Apache-2.0
"""How states pass by chunks of tokens on NVIDIA GPUs, and what is read of them (see `triton_ragged`)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import triton_arrays
from pallas_kernels.gated_delta.triton_runs import PART, Runs, Step, wide
from pallas_kernels.shapes import next_power_of_two
from pallas_kernels.state_rows import CHUNK

# Columns of a state that a program has: one size for any step, so that none sums in another order than the next.
TILE = 32


class Met(NamedTuple):
    """Of each head of each chunk: the state before it `[H, Hv]`, and what its tokens write `[C, Hv]`."""

    states: Any
    written: Any


class Rows(NamedTuple):
    """Of each sequence `[S]`: its slot, its first chunk and how many, whether it goes on, and how many wait; `waiting`,
    pending tokens as they lie in their slots, or `()`."""

    layer: Any
    slots: Any
    first: Any
    count: Any
    goes_on: Any
    num_pending: Any
    waiting: Any


def pass_program(product, inputs, _, states, written, matrix):
    """A tile of columns of one head's state, through the tokens of its sequence."""
    rows, step, runs = inputs
    row, head = pl.program_id(0), pl.program_id(1)
    tile = _columns(matrix.shape[4])

    @pl.when(rows.count[row] > 0)
    def _():
        parts = _parts(matrix.shape[3])
        places = [
            matrix.at[rows.layer[0], rows.slots[row], head, channel[:, None], tile[0][None, :]] for channel, _ in parts
        ]
        masks = [inside[:, None] & tile[1][None, :] for _, inside in parts]
        goes_on = rows.goes_on[row]
        state = tuple(wide(place, mask & goes_on) for place, mask in zip(places, masks, strict=True))
        if not isinstance(rows.waiting, tuple):
            key_head = head // (matrix.shape[2] // step.q.shape[1])
            take = partial(_take, rows, row, head, key_head, parts, tile)
            state = jax.lax.fori_loop(0, rows.num_pending[row], take, state)

        def chunk(index, state):
            visit = _Visit(product, step, runs, rows.first[row] + index, head)
            return visit.after(parts, tile, state, Met(states, written))

        state = jax.lax.fori_loop(0, rows.count[row], chunk, state)
        for place, mask, part in zip(places, masks, state, strict=True):
            plgpu.store(place, part.astype(matrix.dtype), mask=mask)


def answer_program(product, inputs, _, out):
    """A tile of columns of one head's outputs of one chunk."""
    step, runs, met = inputs
    chunk, head = pl.program_id(0), pl.program_id(1)
    tile = _columns(out.shape[2])

    @pl.when(step.lens[chunk] > 0)
    def _():
        visit = _Visit(product, step, runs, chunk, head)
        visit.answer(_parts(step.q.shape[2]), tile, met, out)


def _parts(width: int):
    """Channels of each part of a width, and which of them lie in it. All parts are alike: an odd one spills."""
    size = min(PART, max(triton_arrays.NARROWEST, next_power_of_two(width)))
    starts = range(0, width, size)
    return [(channel, channel < width) for channel in (start + jax.lax.iota(jnp.int32, size) for start in starts)]


def _columns(width: int):
    """The columns of the program's tile, and which of them lie in a state."""
    columns = pl.program_id(2) * TILE + jax.lax.iota(jnp.int32, TILE)
    return columns, columns < width


class _Visit:
    """A tile of columns of a state meets a chunk."""

    def __init__(self, product, step: Step, runs: Runs, chunk, head):
        self.product, self.step, self.runs = product, step, runs
        self.at, self.head = (chunk, head), head
        self.key_head = head // (step.tokens.values.shape[1] // step.q.shape[1])
        self.place = jax.lax.iota(jnp.int32, CHUNK)
        self.token, self.used = step.starts[chunk] + self.place, self.place < step.lens[chunk]

    def after(self, parts, tile, state, met: Met):
        """The state after the chunk's tokens, by parts of its rows; what is met is left behind."""
        columns, within = tile
        seen = jnp.zeros((CHUNK, columns.shape[0]), jnp.float32)
        for part, piece in zip(parts, state, strict=True):
            seen += self.product(self._reading("finding", self.step.tokens.keys, *part), piece)
            place = met.states.at[(*self.at, part[0][:, None], columns[None, :])]
            plgpu.store(place, piece, mask=part[1][:, None] & within[None, :])
        values = self.step.tokens.values.at[self.token[:, None], self.head, columns[None, :]]
        wrong = wide(values, self.used[:, None] & within[None, :]) - self._number("since") * seen
        written = self.product(self._square(self.runs.solved), wrong)
        place = met.written.at[(*self.at, self.place[:, None], columns[None, :])]
        plgpu.store(place, written, mask=jnp.broadcast_to(within[None, :], written.shape))
        written *= self._number("until")
        return tuple(
            self._kept(*part) * piece + self.product(self._reading("keys", self.step.tokens.keys, *part).T, written)
            for part, piece in zip(parts, state, strict=True)
        )

    def answer(self, parts, tile, met: Met, out):
        """Writes the outputs of the chunk's tokens."""
        columns, within = tile
        found = jnp.zeros((CHUNK, columns.shape[0]), jnp.float32)
        for channel, inside in parts:
            place = met.states.at[(*self.at, channel[:, None], columns[None, :])]
            state = wide(place, inside[:, None] & within[None, :])
            found += self.product(self._reading("queries", self.step.q, channel, inside), state)
        place = met.written.at[(*self.at, self.place[:, None], columns[None, :])]
        written = wide(place, jnp.broadcast_to(within[None, :], found.shape))
        found = self._number("since") * found + self.product(self._square(self.runs.mixed), written)
        target = out.at[self.token[:, None], self.head, columns[None, :]]
        plgpu.store(target, found.astype(out.dtype), mask=self.used[:, None] & within[None, :])

    def _square(self, array):
        return plgpu.load(array.at[(*self.at, self.place[:, None], self.place[None, :])])

    def _reading(self, name, array, channel, inside):
        """Keys or queries of the chunk's tokens, `[C, H]`, decayed already if that is by channel."""
        if not self.step.tokens.per_channel:
            place = array.at[self.token[:, None], self.key_head, channel[None, :]]
            return wide(place, self.used[:, None] & inside[None, :])
        place = getattr(self.runs.weights, name).at[(*self.at, self.place[:, None], channel[None, :])]
        return wide(place, jnp.broadcast_to(inside[None, :], (CHUNK, channel.shape[0])))

    def _number(self, name):
        """What decays leave, `[C, 1]`, if it is not by channel."""
        if self.step.tokens.per_channel:
            return jnp.float32(1)
        return plgpu.load(getattr(self.runs.weights, name).at[(*self.at, self.place)])[:, None]

    def _kept(self, channel, inside):
        if not self.step.tokens.per_channel:
            return self.runs.weights.since[(*self.at, CHUNK - 1)]
        return wide(self.runs.weights.kept.at[(*self.at, channel)], inside)[:, None]


def _take(rows: Rows, row, head, key_head, parts, tile, at, state):
    """The state after a pending token, as `triton` has it."""
    columns, within = tile
    place, waiting = (rows.layer[0], rows.slots[row], at), rows.waiting
    value = wide(waiting.values.at[(*place, head, columns)], within)
    strength = waiting.strengths[(*place, head)]
    keys, decayed = [], []
    for (channel, inside), part in zip(parts, state, strict=True):
        keys.append(wide(waiting.keys.at[(*place, key_head, channel)], inside)[:, None])
        if waiting.per_channel:
            decay = wide(waiting.decays.at[(*place, head, channel)], inside)[:, None]
        else:
            decay = waiting.decays[(*place, head)].astype(jnp.float32)
        decayed.append(part * jnp.exp(decay))
    wrong = value - sum(jnp.sum(key * part, axis=0) for key, part in zip(keys, decayed, strict=True))
    added = (strength.astype(jnp.float32) * wrong)[None, :]
    return tuple(part + key * added for key, part in zip(keys, decayed, strict=True))
