# SPDX-License-Identifier: Apache-2.0
"""State space duality for NVIDIA GPUs, ragged rows: a state passes by its sequence's chunks in registers (Dao and Gu
2024, sec. 6).

A program has `TILE` rows of one head's state of one sequence: it reads them once, takes in the accepted pending rows
and then chunk after chunk as products of matrices, and writes them once. What it does depends on nothing but its own
sequence, so that neighbours change no bit. Products have float32's accuracy: of a bfloat16 number and a float32 one as
three of bfloat16, whose parts make up the float32 number; others as three of TF32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.shapes import ceil_div, next_power_of_two
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.ssd.triton import supports as supports_rows
from pallas_kernels.state_rows import StateRows, cut_chunks

# The least side of a product.
LEAST = 16


# Tokens of a chunk, a divisor of where steps may end; rows of a state that a program has, and columns of them that it
# multiplies at a time. Larger ones leave no registers: compiled for H200, chunks of 32 tokens take four times the
# matrix instructions for twice the tokens, and spill.
SIZE, TILE, COLUMNS, NUM_WARPS = 16, 32, 64, 4


class _Inputs(NamedTuple):
    """References to whole arrays: of each sequence its slot, whether it goes on, how many of its pending rows count,
    its first chunk and how many it has; of each chunk its first token and how many; the tokens, and what is pending."""

    layer: Any
    slots: Any
    goes_on: Any
    counts: Any
    first_chunks: Any
    num_chunks: Any
    token_starts: Any
    lens: Any
    heads: SsdHeads
    tokens: SsdTokens
    pending: tuple


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    return supports_rows(**facts)


def take_ragged(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_ragged`."""
    num_tokens, num_heads, head_dim = tokens.x.shape
    chunks = cut_chunks(rows, num_tokens, SIZE)
    sequence = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    own = (chunks.rows[:, None] == sequence) & (chunks.lens > 0)[:, None]
    num_chunks = jnp.sum(own, axis=0, dtype=jnp.int32)
    first_chunks = jnp.cumsum(num_chunks, dtype=jnp.int32) - num_chunks
    goes_on = (rows.starts > 0) & (rows.query_lens > 0)
    counts = jnp.where(goes_on, rows.num_pending, 0)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    told = (index, rows.slots, goes_on, counts, first_chunks, num_chunks, chunks.token_starts, chunks.lens)
    inputs = _Inputs(*told, heads, tokens, storage.pending)
    # Tokens of no sequence are written by no program.
    begin = jnp.zeros(tokens.x.shape, jnp.float32)
    count = len(jax.tree.leaves(inputs))
    outputs, matrix = pl.pallas_call(
        partial(_program, interpret),
        grid=(num_heads, ceil_div(head_dim, TILE), rows.slots.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (begin, storage.matrix)],
        input_output_aliases={count: 0, count + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="ssd_ragged",
    )(inputs, begin, storage.matrix)
    return outputs, storage.replace(matrix=matrix)


take_ragged_interpreted = partial(take_ragged, interpret=True)


def _program(interpret: bool, inputs: _Inputs, _, matrix_in, outputs, matrix):
    _Program(interpret, inputs, outputs, matrix).run(matrix_in)


class _Program:
    """One program. Its state is turned, `[Z, H]`, and in parts of some columns each, to be multiplied with chunks."""

    def __init__(self, interpret: bool, inputs: _Inputs, outputs, matrix):
        self.inputs, self.outputs, self.matrix = inputs, outputs, matrix
        self.product = partial(_product, interpret)
        self.head, self.sequence = pl.program_id(0), pl.program_id(2)
        num_heads, head_dim, state_dim = matrix.shape[2:]
        self.group = self.head // (num_heads // inputs.tokens.b.shape[1])
        self.layer, self.slot = inputs.layer[0], inputs.slots[self.sequence]
        self.row = pl.program_id(1) * TILE + jax.lax.iota(jnp.int32, TILE)
        self.in_rows = self.row < head_dim
        columns = min(COLUMNS, max(LEAST, next_power_of_two(state_dim)))
        self.columns = [start + jax.lax.iota(jnp.int32, columns) for start in range(0, state_dim, columns)]
        self.a, self.d = inputs.heads.a[self.head], inputs.heads.d[self.head]

    def run(self, matrix_in):
        inputs, sequence = self.inputs, self.sequence
        goes_on = inputs.goes_on[sequence]
        state = tuple(
            plgpu.load(matrix_in.at[self._place(cols)], mask=self._inside(cols) & goes_on, other=0.0)
            for cols in self.columns
        )
        state = tuple(part.astype(jnp.float32) for part in state)
        if inputs.pending:
            state = jax.lax.fori_loop(0, inputs.counts[sequence], self._fold, state)
        first, count = inputs.first_chunks[sequence], inputs.num_chunks[sequence]
        state = jax.lax.fori_loop(first, first + count, self._visit, state)
        for cols, part in zip(self.columns, state, strict=True):
            mask = self._inside(cols) & (count > 0)
            plgpu.store(self.matrix.at[self._place(cols)], part.astype(self.matrix.dtype), mask=mask)

    def _place(self, cols):
        return self.layer, self.slot, self.head, self.row[None, :], cols[:, None]

    def _inside(self, cols):
        return self._in(cols)[:, None] & self.in_rows[None, :]

    def _in(self, cols):
        return cols < self.matrix.shape[4]

    def _fold(self, index, state):
        """The state after a pending row."""
        place = self.layer, self.slot, index
        x, dt, b = self.inputs.pending
        dt = dt[*place, self.head]
        x = dt * plgpu.load(x.at[*place, self.head, self.row], mask=self.in_rows, other=0.0)
        bs = [plgpu.load(b.at[*place, self.group, cols], mask=self._in(cols), other=0.0) for cols in self.columns]
        kept = jnp.exp(dt * self.a)
        return tuple(kept * part + b[:, None] * x[None, :] for part, b in zip(state, bs, strict=True))

    def _visit(self, index, state):
        """The state after a chunk, whose outputs are written."""
        tokens, product = self.inputs.tokens, self.product
        order = jax.lax.iota(jnp.int32, SIZE)
        there = order < self.inputs.lens[index]
        token = self.inputs.token_starts[index] + order

        def shared(part, cols):
            mask = there[:, None] & self._in(cols)[None, :]
            return plgpu.load(part.at[token[:, None], self.group, cols[None, :]], mask=mask, other=0.0)

        weight = found = None
        for cols, part in zip(self.columns, state, strict=True):
            c = shared(tokens.c, cols)
            score, read = product(c, shared(tokens.b, cols), (1, 1)), product(c, part, (1, 0))
            weight, found = (score, read) if weight is None else (weight + score, found + read)
        dt = plgpu.load(tokens.dt.at[token, self.head], mask=there, other=0.0)
        # Tokens that are not there have steps of zero: the last place has what all of them leave.
        passed = jnp.cumsum(dt * self.a)
        end = jnp.sum(jnp.where(order == SIZE - 1, passed, 0.0))
        since = jnp.where(order[:, None] >= order[None, :], passed[:, None] - passed[None, :], -jnp.inf)
        weight = weight * jnp.exp(since) * dt[None, :]
        in_x = there[:, None] & self.in_rows[None, :]
        place = token[:, None], self.head, self.row[None, :]
        x = plgpu.load(tokens.x.at[place], mask=in_x, other=0.0)
        given = product(weight, x, (1, 0)) + jnp.exp(passed)[:, None] * found + self.d * x.astype(jnp.float32)
        plgpu.store(self.outputs.at[place], given, mask=in_x)
        left = x.astype(jnp.float32) * (jnp.exp(end - passed) * dt)[:, None]
        kept = jnp.exp(end)
        return tuple(
            kept * part + product(shared(tokens.b, cols), left, (0, 0))
            for cols, part in zip(self.columns, state, strict=True)
        )


def _product(interpret: bool, left, right, axes: tuple[int, int]):
    """Left and right summed over an axis of each, with float32's accuracy."""
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    dot = partial(jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32)
    if left.dtype == right.dtype == jnp.bfloat16:
        return dot(left, right)
    if jnp.bfloat16 in (left.dtype, right.dtype):
        lefts, rights = ([part] if part.dtype == jnp.bfloat16 else _parts(part) for part in (left, right))
        first, *others = [(x, y) for x in lefts for y in rights]
        total = dot(*first)
        for pair in others:
            total += dot(*pair)
        return total
    if left.dtype == right.dtype == jnp.float16:
        return dot(left, right)
    exact = jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return dot(left.astype(jnp.float32), right.astype(jnp.float32), precision=exact)


def _parts(wide):
    """Three bfloat16 arrays whose sum is the float32 one, the least first."""
    high = wide.astype(jnp.bfloat16)
    rest = wide - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    return [(rest - middle.astype(jnp.float32)).astype(jnp.bfloat16), middle, high]
