# SPDX-License-Identifier: Apache-2.0
"""State space duality for TPUs, ragged rows: a state passes by its sequence's chunks in VMEM (Dao and Gu 2024, sec. 6).

A grid step has a chunk of one sequence and some heads; chunks of a sequence follow each other, so that its state is
fetched before the first and written after the last of them. Tokens of a chunk lie in lanes, those of two heads of a
group beside each other: a product of matrices is as fast for 128 of them as for 64. What XLA lays out so, and back, is
read and written once more; states are not.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd.mosaic_tpu import PIECE_BYTES
from pallas_kernels.ssd.mosaic_tpu import supports as supports_rows
from pallas_kernels.ssd.mosaic_tpu_ragged_step import Numbers, Run, Sizes, body
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks, cut_out, flat_index, waiting_rows
from pallas_kernels.storage import SUBLANES, padded_bytes

# The compiler's own stack beside the buffers that the kernel names.
VMEM_SLACK = 8 << 20


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if facts["num_pending"] > CHUNK:
        return f"num_pending={facts['num_pending']} are more than the {CHUNK} that are taken in at once; draft fewer"
    return supports_rows(**facts)


def sizes_of(tokens: SsdTokens, size: int) -> Sizes:
    """The cut of a call with chunks of so many tokens."""
    _, num_heads, head_dim = tokens.x.shape
    _, num_groups, state_dim = tokens.b.shape
    span = 2 if num_heads // num_groups % 2 == 0 and head_dim % SUBLANES == 0 else 1
    head = padded_bytes((head_dim, state_dim), jnp.float32)
    fitting = [n for n in range(span, num_heads + 1, span) if num_heads % n == 0 and n * head <= PIECE_BYTES]
    # Of rows `[U, lanes]` a step has whole tiles, or all.
    fitting = [n for n in fitting if n // span % SUBLANES == 0]
    return Sizes(size, span, max(fitting, default=num_heads), num_heads, num_groups, head_dim, state_dim)


def take_ragged(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: Any = False,
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_ragged`. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    num_tokens = tokens.x.shape[0]
    chunks = rows.chunks if rows.chunks != () else cut_chunks(rows, num_tokens, CHUNK)
    sizes = sizes_of(tokens, chunks.size)
    index = chunks.token_index(num_tokens)
    there = index < num_tokens
    cut = jax.tree.map(lambda part: cut_out(part, index), tokens)
    run = _laid_out(cut, there, heads.a, sizes)
    waiting = ()
    if storage.num_pending:
        x, dt, b = waiting_rows(list(storage.pending), layer, rows)
        counted = jnp.arange(x.shape[1], dtype=jnp.int32) < rows.num_pending[:, None]
        waiting = _laid_out(SsdTokens(x, dt, b, jnp.zeros_like(b)), counted, heads.a, sizes)
    numbers = _numbers(layer, rows, chunks)
    skip = jnp.repeat(heads.d, sizes.chunk).reshape(-1, sizes.lanes)
    given, matrix = _call(numbers, run, waiting, skip, storage.matrix, sizes, interpret)
    # Tokens in rows again, and each asks for its own.
    given = given.reshape(given.shape[0], -1, sizes.head_dim, sizes.span, sizes.chunk).transpose(0, 4, 1, 3, 2)
    given = given.reshape(-1, *tokens.x.shape[1:])
    chunk, place = flat_index(chunks, num_tokens)
    inside = jnp.arange(num_tokens, dtype=jnp.int32) < jnp.sum(rows.query_lens)
    outputs = cut_out(given, chunk * sizes.chunk + place)
    return jnp.where(inside[:, None, None], outputs, 0), storage.replace(matrix=matrix)


take_ragged_interpreted = partial(
    take_ragged, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
)


def _laid_out(cut: SsdTokens, there, a, sizes: Sizes) -> Run:
    """Tokens `[n, C, ...]` of chunks, no more than `sizes.chunk`, as the kernel takes them; zeros where none are."""
    count, width = there.shape

    def filled(part):
        part = jnp.where(there.reshape(count, width, *[1] * (part.ndim - 2)), part, 0)
        return jnp.pad(part, ((0, 0), (0, sizes.chunk - width), *[(0, 0)] * (part.ndim - 2)))

    x, dt, b, c = map(filled, (cut.x, cut.dt, cut.b, cut.c))
    x = x.reshape(count, sizes.chunk, -1, sizes.span, sizes.head_dim).transpose(0, 2, 4, 3, 1)
    passed = jnp.cumsum(dt * a, axis=1)
    end = jnp.broadcast_to(passed[:, -1:], passed.shape)

    def by_unit(part):
        return part.transpose(0, 2, 1).reshape(count, -1, sizes.lanes)

    b, c = jnp.tile(b.transpose(0, 2, 1, 3), (1, 1, sizes.span, 1)), jnp.tile(c.transpose(0, 2, 3, 1), sizes.span)
    return Run(x.reshape(*x.shape[:3], sizes.lanes), *map(by_unit, (dt, passed, end)), b, c)


def _numbers(layer, rows: StateRows, chunks) -> Numbers:
    there = chunks.lens > 0
    last = jnp.maximum(jnp.sum(there, dtype=jnp.int32) - 1, 0)
    place = jnp.minimum(jnp.arange(there.shape[0], dtype=jnp.int32), last)
    row = chunks.rows[place]
    goes_on = (rows.starts > 0) & (rows.query_lens > 0)
    counts = jnp.where(goes_on, rows.num_pending, 0)
    slot = jnp.where(there[last], rows.slots[row], 0)
    flags = (part.astype(jnp.int32) for part in (there, chunks.first, chunks.last, goes_on[row]))
    return Numbers(jnp.asarray(layer, jnp.int32).reshape(1), place, row, slot, *flags, counts[row])


def _call(numbers: Numbers, run: Run, waiting, skip, matrix, sizes: Sizes, interpret):
    inputs = (run, waiting, skip, matrix)
    specs, state = _specs(inputs, sizes)
    count = len(numbers) + len(jax.tree.leaves(inputs)) - 1
    shapes = [jax.ShapeDtypeStruct(run.x.shape, jnp.float32), jax.ShapeDtypeStruct(matrix.shape, matrix.dtype)]
    buffers = [pltpu.VMEM((sizes.piece, sizes.head_dim, sizes.state_dim), jnp.float32)]
    buffers += [pltpu.VMEM((sizes.num_groups, sizes.lanes, sizes.lanes), jnp.float32)]
    blocks = [(spec.block_shape, leaf.dtype) for spec, leaf in zip(specs, jax.tree.leaves(inputs), strict=True)]
    blocks += [(specs[0].block_shape, jnp.float32), (state.block_shape, matrix.dtype)]
    moving = sum(padded_bytes(tuple(side or 1 for side in shape), dtype) for shape, dtype in blocks)
    return pl.pallas_call(
        partial(body, sizes, jax.tree.structure(inputs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(sizes.num_heads // sizes.piece, run.x.shape[0]),
            in_specs=specs,
            out_specs=[specs[0], state],
            scratch_shapes=buffers,
        ),
        out_shape=shapes,
        input_output_aliases={count: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=2 * moving + sum(padded_bytes(x.shape, x.dtype) for x in buffers) + VMEM_SLACK,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="ssd_ragged",
    )(*numbers, *jax.tree.leaves(inputs))


def _specs(inputs, sizes: Sizes):
    """The parts of the inputs that a grid step has, as leaves, and that of the states."""

    def of(part, index, by_piece: bool):
        """A chunk's part, or a sequence's of what is pending there, of the heads of the step or of all."""
        shape = (None, sizes.units, *part.shape[2:]) if by_piece else (None, *part.shape[1:])
        rest = len(part.shape) - 2

        def at(piece, chunk, *numbers):
            return getattr(Numbers(*numbers), index)[chunk], piece if by_piece else 0, *[0] * rest

        return pl.BlockSpec(shape, at)

    def run_specs(run, index):
        return (
            [of(part, index, name not in ("b", "c")) for name, part in zip(Run._fields, run, strict=True)]
            if run
            else []
        )

    run, waiting, skip, _ = inputs
    skip_spec = pl.BlockSpec((sizes.units, skip.shape[1]), lambda piece, *_: (piece, 0))

    def state(piece, chunk, *numbers):
        numbers = Numbers(*numbers)
        return numbers.layer[0], numbers.slot[chunk], piece, 0, 0

    matrix = pl.BlockSpec((None, None, sizes.piece, sizes.head_dim, sizes.state_dim), state)
    return [*run_specs(run, "place"), *run_specs(waiting, "row"), skip_spec, matrix], matrix
