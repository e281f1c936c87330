# SPDX-License-Identifier: Apache-2.0
"""The body of state space duality on a TPU: some heads of one row's state, taken through the row's tokens.

Rows of a state lie in sublanes. What heads get of a token, `[N, H]` with a head's numbers in lanes, is turned once a
token, and so is what they give; a head picks its own lane of what was turned.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import round_up
from pallas_kernels.storage import LANES

# Heads whose instructions overlap.
HEADS_AT_A_TIME = 2


class Numbers(NamedTuple):
    """Known to the scalar core before the kernel starts: the layer `[1]`; of each row `[S]` its slot, whether its
    sequence goes on, how many of its pending rows count, and how many tokens it has."""

    layer: Any
    slots: Any
    goes_on: Any
    counts: Any
    lens: Any


class Inputs(NamedTuple):
    """In VMEM: of the row `x [Q, N, H]`, `dt [Q, N]`, `b` and `c` `[Q, K, Z]` in float32; `a` and `d` `[1, N]`; what is
    pending in its slot, or `()`; and the heads of the grid step, of the row's state `[n, H, Z]`."""

    x: Any
    dt: Any
    b: Any
    c: Any
    a: Any
    d: Any
    pending: tuple
    matrix: Any


class Outputs(NamedTuple):
    """Of the row `y [Q, N, H]`, the state after its first token, and what is pending after it or `()`."""

    y: Any
    matrix: Any
    pending: tuple


class Scratch(NamedTuple):
    """Of pending rows and tokens: `dt x` turned, `[J + Q, H, N]`, and what a state is multiplied with, `[J + Q, N]`;
    what heads give of tokens, turned, `[Q, H, N]`; and what is being turned, `[N, H]`. Both sides are whole tiles."""

    taken: Any
    kept: Any
    given: Any
    turned: Any


@dataclass(frozen=True)
class Sizes:
    """The static sizes of a call; `piece` heads a grid step."""

    num_pending: int
    width: int
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    piece: int

    @property
    def num_pieces(self) -> int:
        """Grid steps of a row."""
        return self.num_heads // self.piece


def scratch_of(sizes: Sizes) -> Scratch:
    """The scratch memory of a call."""
    sides = round_up(sizes.head_dim, LANES), round_up(sizes.num_heads, LANES)
    count = sizes.num_pending + sizes.width
    return Scratch(
        taken=pltpu.VMEM((count, *sides), jnp.float32),
        kept=pltpu.VMEM((count, sides[1]), jnp.float32),
        given=pltpu.VMEM((sizes.width, *sides), jnp.float32),
        turned=pltpu.VMEM(sides[::-1], jnp.float32),
    )


def body(sizes: Sizes, in_tree, out_tree, *refs) -> None:
    """Runs one grid step on references of `Numbers`, of `Inputs`, of `Outputs` and of `Scratch`."""
    count = len(Numbers._fields)
    rest = refs[count + in_tree.num_leaves :]
    inputs = in_tree.unflatten(refs[count : count + in_tree.num_leaves])
    outputs = out_tree.unflatten(rest[: out_tree.num_leaves])
    _Step(sizes, Numbers(*refs[:count]), inputs, outputs, Scratch(*rest[out_tree.num_leaves :])).run()


class _Step:
    """One grid step: some heads of one row."""

    def __init__(self, sizes: Sizes, numbers: Numbers, inputs: Inputs, outputs: Outputs, scratch: Scratch):
        self.sizes, self.inputs, self.outputs, self.scratch = sizes, inputs, outputs, scratch
        row, self.piece = pl.program_id(0), pl.program_id(1)
        self.goes_on, self.count, self.len = numbers.goes_on[row] > 0, numbers.counts[row], numbers.lens[row]

    def run(self):
        at_a_time = HEADS_AT_A_TIME if self.sizes.piece % HEADS_AT_A_TIME == 0 else 1

        @pl.when((self.piece == 0) & (self.len > 0))
        def _():
            self._begin()

        @pl.when(self.len > 0)
        def _():
            def visit(index, carry):
                for head in range(at_a_time):
                    self._head(index * at_a_time + head)
                return carry

            jax.lax.fori_loop(0, self.sizes.piece // at_a_time, visit, None)

        @pl.when(self.piece == self.sizes.num_pieces - 1)
        def _():
            self._finish()

    # -- once a row

    def _begin(self):
        """What the state takes of every token, and what is pending after the row."""
        num_pending, inputs, given = self.sizes.num_pending, self.inputs, self.scratch.given
        skip = inputs.d[...]
        for index in range(num_pending):

            @pl.when(index < self.count)
            def _(index=index):
                self._take(index, inputs.pending[0][index], inputs.pending[1][index : index + 1])

        for index in range(self.sizes.width):

            @pl.when(index < self.len)
            def _(index=index):
                x = self._take(num_pending + index, inputs.x[index], inputs.dt[index : index + 1])
                given[index, :, : self.sizes.num_heads] = skip * x

        if self.sizes.width > 1:
            new = (inputs.x, inputs.dt, inputs.b)
            for before, after, tokens in zip(inputs.pending, self.outputs.pending, new, strict=True):
                for index in range(num_pending):
                    kept = before[index]
                    if index + 1 < self.sizes.width:
                        kept = jnp.where(index + 1 < self.len, tokens[index + 1].astype(kept.dtype), kept)
                    after[index] = kept

    def _take(self, place: int, x, dt):
        """`x [N, H]` turned, `[H, N]`, once what a token of `dt [1, N]` does is noted."""
        scratch, num_heads = self.scratch, self.sizes.num_heads
        scratch.turned[:num_heads, : self.sizes.head_dim] = x.astype(jnp.float32)
        x = scratch.turned[...].T[:, :num_heads]
        scratch.taken[place, :, :num_heads] = dt * x
        scratch.kept[place : place + 1, :num_heads] = jnp.exp(dt * self.inputs.a[...])
        return x

    def _finish(self):
        y, sizes = self.outputs.y, self.sizes
        for index in range(sizes.width):

            @pl.when(index < self.len)
            def _(index=index):
                y[index] = self.scratch.given[index].T[: sizes.num_heads, : sizes.head_dim]

            @pl.when(index >= self.len)
            def _(index=index):
                y[index] = jnp.zeros(y.shape[1:], y.dtype)

    # -- each head

    def _head(self, index):
        """Takes the tokens of the row into one head's state, which stays in registers."""
        sizes, inputs, matrix = self.sizes, self.inputs, self.outputs.matrix
        head = self.piece * sizes.piece + index
        group = jax.lax.div(head, jnp.int32(sizes.num_heads // sizes.num_groups))
        state = jnp.where(self.goes_on, inputs.matrix[index].astype(jnp.float32), 0.0)
        if sizes.num_pending:

            def fold(token, state):
                return self._taken(head, state, token, inputs.pending[2][token, pl.ds(group, 1)])

            state = jax.lax.fori_loop(0, self.count, fold, state)

        def answer(token, state):
            state = self._taken(head, state, sizes.num_pending + token, inputs.b[token, pl.ds(group, 1)])
            found = jnp.sum(state * inputs.c[token, pl.ds(group, 1)], axis=1, keepdims=True)
            here, given = self._lanes_of(head, self.scratch.given.at[token, : sizes.head_dim])
            given[...] = jnp.where(here, given[...] + found, given[...])
            return state

        state = answer(0, state)
        matrix[index] = state.astype(matrix.dtype)
        if sizes.width > 1:
            jax.lax.fori_loop(1, self.len, answer, state)

    def _taken(self, head, state, place, b):
        """The state `[H, Z]` after a token."""
        here, taken = self._lanes_of(head, self.scratch.taken.at[place, : self.sizes.head_dim])
        _, kept = self._lanes_of(head, self.scratch.kept.at[pl.ds(place, 1)])
        return _picked(here, kept[...]) * state + _picked(here, taken[...]) * b

    def _lanes_of(self, head, ref):
        """Which of 128 lanes is the head's, `[1, 128]`, and the part of `ref [rows, N]` that has them."""
        tile, lane = jax.lax.div(head, jnp.int32(LANES)), jax.lax.rem(head, jnp.int32(LANES))
        here = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) == lane
        if self.sizes.num_heads <= LANES:
            return here, ref
        return here, ref.at[:, pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)]


def _picked(here, rows):
    """One lane of each row, as a column."""
    return jnp.sum(jnp.where(here, rows, 0.0), axis=1, keepdims=True)
