# SPDX-License-Identifier: Apache-2.0
"""The body of state space duality over ragged rows on a TPU: a chunk of one sequence, for some heads (see
`mosaic_tpu_ragged`)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Sizes:
    """The static sizes of a call: tokens of a chunk, heads that share lanes, heads of a grid step."""

    chunk: int
    span: int
    piece: int
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int

    @property
    def units(self) -> int:
        """Of heads that share lanes, in a grid step."""
        return self.piece // self.span

    @property
    def lanes(self) -> int:
        """Tokens of the heads that share lanes."""
        return self.chunk * self.span

    @property
    def units_of_group(self) -> int:
        """Units whose heads share b and c."""
        return self.num_heads // self.num_groups // self.span


class Run(NamedTuple):
    """Chunks as the kernel takes them, `[n, ...]`: of units `x [U, H, lanes]` and in float32 `dt`, what has passed
    until each token and until the last one, `[U, lanes]`; of groups b as often as heads share lanes, `[K, lanes, Z]`,
    and c so, turned, `[K, Z, lanes]`."""

    x: Any
    dt: Any
    passed: Any
    end: Any
    b: Any
    c: Any


class Numbers(NamedTuple):
    """Known before the kernel starts: the layer `[1]`; of each chunk its place (that of the last one, for padding), the
    sequence, slot, whether it is there, first and last of its sequence, whether that goes on and how much is pending.
    """

    layer: Any
    place: Any
    row: Any
    slot: Any
    there: Any
    first: Any
    last: Any
    goes_on: Any
    counts: Any


def body(sizes: Sizes, in_tree, *refs) -> None:
    """Runs one grid step on references of `Numbers`, of the inputs, of answers and states, and of scratch memory: the
    states, and scores of each group."""
    count = len(Numbers._fields)
    numbers, rest = Numbers(*refs[:count]), refs[count + in_tree.num_leaves :]
    run, waiting, skip, before = in_tree.unflatten(refs[count : count + in_tree.num_leaves])
    given, after, states, scores = rest
    chunk = pl.program_id(1)

    @pl.when((numbers.there[chunk] > 0) & (numbers.first[chunk] > 0))
    def _():
        goes_on = numbers.goes_on[chunk] > 0
        states[...] = jnp.where(goes_on, before[...].astype(jnp.float32), 0.0)
        if waiting:

            @pl.when(numbers.counts[chunk] > 0)
            def _():
                _take(sizes, waiting, states, ())

    @pl.when(numbers.there[chunk] > 0)
    def _():
        _take(sizes, run, states, (skip, given, scores))

    @pl.when((numbers.there[chunk] > 0) & (numbers.last[chunk] > 0))
    def _():
        after[...] = states[...].astype(after.dtype)


def _take(sizes: Sizes, run: Run, states, answering: tuple):
    """Takes a chunk into the states; with `answering`, the skip, where answers go and room for scores, answers it."""
    lanes, rows = sizes.lanes, sizes.span * sizes.head_dim
    first = pl.program_id(0) * sizes.units
    row, col = (jax.lax.broadcasted_iota(jnp.int32, (lanes, lanes), axis) for axis in (0, 1))
    # Of heads beside each other none sees the other's tokens.
    chunk = jnp.int32(sizes.chunk)
    seen = (row <= col) & (jax.lax.div(row, chunk) == jax.lax.div(col, chunk))
    half = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1), chunk)
    if answering:
        skip, given, scores = answering

        def score(group, carry):
            scores[group] = _product(run.b[group], run.c[group])
            return carry

        groups = (jax.lax.div(first + unit, jnp.int32(sizes.units_of_group)) for unit in (0, sizes.units - 1))
        begin, end = groups
        jax.lax.fori_loop(begin, end + 1, score, None)

    def visit(unit, carry):
        group = jax.lax.div(first + unit, jnp.int32(sizes.units_of_group))
        x = run.x[unit].astype(jnp.float32)
        dt, passed, end = (part[pl.ds(unit, 1)] for part in (run.dt, run.passed, run.end))
        heads = pl.ds(unit * sizes.span, sizes.span)
        state = states[heads].reshape(rows, sizes.state_dim)
        stepped = x * dt
        if answering:
            column = jnp.sum(jnp.where(row == col, passed, 0.0), axis=1, keepdims=True)
            weight = scores[group] * jnp.exp(jnp.where(seen, passed - column, -jnp.inf))
            read = _product(state, run.c[group])
            own = read[: sizes.head_dim]
            for index in range(1, sizes.span):
                own = jnp.where(half == index, read[index * sizes.head_dim : (index + 1) * sizes.head_dim], own)
            answer = _product(stepped, weight) + jnp.exp(passed) * own
            given[unit] = answer + skip[pl.ds(unit, 1)] * x
        left = stepped * jnp.exp(end - passed)
        # Each head's rows of its own tokens, and the share of its state that is left.
        parts = [jnp.where(half == index, left, 0.0) for index in range(sizes.span)]
        kept = [jnp.exp(end[:, index * sizes.chunk : index * sizes.chunk + 1]) for index in range(sizes.span)]
        kept = [jnp.broadcast_to(part, (sizes.head_dim, 1)) for part in kept]
        left, kept = (jnp.concatenate(part, axis=0) if sizes.span > 1 else part[0] for part in (parts, kept))
        state = kept * state + _product(left, run.b[group])
        states[heads] = state.reshape(sizes.span, sizes.head_dim, sizes.state_dim)
        return carry

    jax.lax.fori_loop(0, sizes.units, visit, None)


def _product(left, right):
    """The product of matrices with float32's accuracy: of bfloat16 numbers it is exact, and a float32 one is three."""
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    if right.dtype != jnp.bfloat16:
        return dot(left.astype(jnp.float32), right.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    if left.dtype == jnp.bfloat16:
        return dot(left, right)
    high = left.astype(jnp.bfloat16)
    rest = left - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    return dot(low, right) + dot(middle, right) + dot(high, right)
