# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over ragged rows for NVIDIA GPUs, in three steps (see `chunk`).

All that needs no state is made at once, a program for each head of each chunk. Then a program has a tile of columns of
one head's state in registers, and takes it through the pending tokens and the chunks of its sequence: a state is read
once and written once. It leaves behind what each chunk met, from which the outputs are again made at once. Products are
true to float32, on tensor cores, which multiply the upper and the lower halves of numbers apart. What is multiplied is
read from memory as it is, as far as can be: made in registers, its halves do not fit in them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import triton_arrays
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.gated_delta.triton_runs import (
    SUMS,
    Channels,
    Numbers,
    Runs,
    Step,
    solve_program,
    weigh_program,
)
from pallas_kernels.gated_delta.triton_states import TILE, Met, Rows, answer_program, pass_program
from pallas_kernels.shapes import ceil_div
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks

WIDEST = 256
NUM_WARPS = 4
SPLIT = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def supports(rows: int, dtype: str, codes: int, **facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if rows > WIDEST:
        return f"keys of {rows} are above the {WIDEST} whose states fit in registers"
    return triton_arrays.overflow(dtype, codes)


def delta_ragged(
    q: Float[Array, "T N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: bool = False,
) -> tuple[Float[Array, "T V Hv"], Float[Array, "L U V H Hv"]]:
    """See `op.delta_ragged`."""
    product = partial(_product, jax.lax.Precision.HIGHEST if interpret else SPLIT)
    chunks = rows.chunks or cut_chunks(rows, q.shape[0], CHUNK)
    step = Step(chunks.token_starts, chunks.lens, q, tokens, jnp.asarray(SUMS))
    heads, columns = matrix.shape[2], matrix.shape[4]
    each = jnp.sum((chunks.rows == jnp.arange(len(rows.slots))[:, None]) & (chunks.lens > 0), axis=1, dtype=jnp.int32)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    sequences = Rows(index, rows.slots, jnp.cumsum(each) - each, each, rows.starts > 0, rows.num_pending, pending)
    call = partial(_call, product, interpret)
    runs = _runs(call, step, heads)
    grid, lead = ceil_div(columns, TILE), (*step.lens.shape, heads)
    shapes = [(*lead, matrix.shape[3], columns), (*lead, CHUNK, columns)]
    met = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs = sequences, step, runs
    *met, matrix = call(pass_program, "gated_delta_ragged", (len(rows.slots), heads, grid), met, inputs, matrix)
    out = jnp.zeros((*q.shape[:1], heads, columns), q.dtype)
    (out,) = call(answer_program, "gated_delta_outputs", (*lead, grid), [], (step, runs, Met(*met)), out)
    return out, matrix


delta_ragged_interpreted = partial(delta_ragged, interpret=True)


def _call(product, interpret, program, name, grid, made, inputs, *changed):
    """The arrays `made` by a kernel of `inputs`, then those `changed` in place."""
    first = len(jax.tree.leaves(inputs))
    return pl.pallas_call(
        partial(program, product),
        grid=grid,
        out_shape=[*made, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed)],
        input_output_aliases={first + index: len(made) + index for index in range(len(changed))},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=name,
    )(inputs, *changed)


def _runs(call, step: Step, heads: int) -> Runs:
    """What needs no state, of all chunks."""
    lead, width = (*step.lens.shape, heads), step.q.shape[2]

    def made(*shapes):
        return [jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in shapes]

    square, rows = (CHUNK, CHUNK), (CHUNK, width)
    numbers = () if step.tokens.per_channel else ((CHUNK,), (CHUNK,))
    shapes = made(square, square, *numbers)
    solved, mixed, *weights = call(solve_program, "gated_delta_triangles", lead, shapes, step)
    if numbers:
        return Runs(solved, mixed, Numbers(*weights))
    weights = call(weigh_program, "gated_delta_channels", lead, made(rows, rows, rows, (width,)), step)
    return Runs(solved, mixed, Channels(*weights))


def _product(precision, left, right):
    return plgpu.dot(left, right, precision=precision)
