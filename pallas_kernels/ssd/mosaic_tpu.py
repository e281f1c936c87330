# SPDX-License-Identifier: Apache-2.0
"""State space duality for TPUs, equal rows: each state is read once, taken through its tokens in registers, and written
once.

A grid step (see `mosaic_tpu_step`) has some heads of one sequence's state; while it is worked on the next one is on its
way, and the last one on its way back. What waits in a slot is read where it lies, and drafts are written there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd.mosaic_tpu_step import Inputs, Numbers, Outputs, Sizes, body, scratch_of
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.state_rows import StateRows
from pallas_kernels.storage import padded_bytes

# Of a state as much at a time as hides the latency of memory and leaves two pieces room on their ways in and out.
PIECE_BYTES = 1 << 20
# The compiler's own stack beside the buffers that the kernel names.
VMEM_SLACK = 4 << 20
DECLINED = ("float16",)


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    for name in ("dtype", "state_dtype"):
        if facts[name] in DECLINED:
            return f"{name}={facts[name]!r} cannot be loaded by a TPU, which loads bfloat16 and float32; use either"
    return ""


def sizes_of(tokens: SsdTokens, storage: SsdStorage, width: int) -> Sizes:
    """The cut of a call whose rows have `width` tokens."""
    _, num_heads, head_dim = tokens.x.shape
    _, num_groups, state_dim = tokens.b.shape
    head = padded_bytes((head_dim, state_dim), jnp.float32)
    fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n * head <= PIECE_BYTES]
    piece = max(fitting, default=1)
    return Sizes(storage.num_pending, width, num_heads, num_groups, head_dim, state_dim, piece)


def take_rows(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: Any = False,
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_rows`. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    sizes = sizes_of(tokens, storage, rows.max_query_len)
    goes_on = (rows.starts > 0) & (rows.query_lens > 0)
    counts = jnp.where(goes_on, rows.num_pending, 0)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    numbers = Numbers(index, rows.slots, goes_on.astype(jnp.int32), counts, rows.query_lens)

    def by_row(part):
        return part.reshape(-1, sizes.width, *part.shape[1:])

    inputs = Inputs(
        x=by_row(tokens.x),
        dt=by_row(tokens.dt),
        b=by_row(tokens.b).astype(jnp.float32),
        c=by_row(tokens.c).astype(jnp.float32),
        a=heads.a[None],
        d=heads.d[None],
        pending=storage.pending,
        matrix=storage.matrix,
    )
    y = jax.ShapeDtypeStruct(inputs.x.shape, jnp.float32)
    outputs = _call(numbers, inputs, y, sizes, interpret)
    pending = outputs.pending or storage.pending
    return outputs.y.reshape(tokens.x.shape), SsdStorage(outputs.matrix, pending)


take_rows_interpreted = partial(
    take_rows, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
)


def _call(numbers: Numbers, inputs: Inputs, y: jax.ShapeDtypeStruct, sizes: Sizes, interpret) -> Outputs:
    drafting = sizes.width > 1
    written = inputs.pending if drafting else ()
    shapes = Outputs(y, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs.matrix, written)))
    in_specs, out_specs = _specs(inputs, sizes)
    # The matrix is the last of the inputs, what is pending comes before it.
    last, count = len(numbers) + len(jax.tree.leaves(inputs)) - 1, len(inputs.pending)
    aliases = {last: 1, **({last - count + index: 2 + index for index in range(count)} if drafting else {})}
    found = pl.pallas_call(
        partial(body, sizes, jax.tree.structure(inputs), jax.tree.structure(shapes)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(y.shape[0], sizes.num_pieces),
            in_specs=jax.tree.leaves(in_specs),
            out_specs=jax.tree.leaves(out_specs),
            scratch_shapes=scratch_of(sizes),
        ),
        out_shape=jax.tree.leaves(shapes),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(sizes, inputs.x.dtype, inputs.matrix.dtype) + VMEM_SLACK,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="ssd_rows",
    )(*numbers, *jax.tree.leaves(inputs))
    return jax.tree.structure(shapes).unflatten(found)


def vmem_bytes(sizes: Sizes, dtype, state_dtype) -> int:
    """Bytes of VMEM that the kernel's buffers take: two of each that comes or goes, and its scratch."""
    wide = jnp.float32
    of_heads = sizes.num_heads, sizes.head_dim
    state, shared = (sizes.piece, sizes.head_dim, sizes.state_dim), (sizes.num_groups, sizes.state_dim)
    coming = padded_bytes((sizes.width, *of_heads), dtype) + 2 * padded_bytes((sizes.width, *shared), wide)
    coming += padded_bytes((sizes.width, sizes.num_heads), wide) + 2 * padded_bytes((1, sizes.num_heads), wide)
    going = padded_bytes((sizes.width, *of_heads), wide)
    waiting = padded_bytes((sizes.num_pending, *of_heads), wide) + padded_bytes(
        (sizes.num_pending, sizes.num_heads), wide
    )
    waiting += padded_bytes((sizes.num_pending, sizes.num_groups, sizes.state_dim), wide)
    pending = (2 if sizes.width > 1 else 1) * (waiting if sizes.num_pending else 0)
    moving = 2 * (coming + going + pending + 2 * padded_bytes(state, state_dtype))
    return moving + sum(padded_bytes(x.shape, x.dtype) for x in scratch_of(sizes))


def _specs(inputs: Inputs, sizes: Sizes) -> tuple[Inputs, Outputs]:
    """Which parts of the arrays a grid step has. Padding names the first heads of slot 0 again and again, and a row
    that has nothing pending slot 0, so that nothing is moved for them."""

    def of_row(shape):
        return pl.BlockSpec((None, *shape[1:]), lambda row, piece, *_: (row, *[0] * (len(shape) - 1)))

    def whole(shape):
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    def state(row, piece, *numbers):
        numbers = Numbers(*numbers)
        there = numbers.lens[row] > 0
        return numbers.layer[0], jnp.where(there, numbers.slots[row], 0), jnp.where(there, piece, 0), 0, 0

    def waiting(shape):
        def at(row, piece, *numbers):
            numbers = Numbers(*numbers)
            used = numbers.lens[row] > 0 if sizes.width > 1 else numbers.counts[row] > 0
            return numbers.layer[0], jnp.where(used, numbers.slots[row], 0), *[0] * (len(shape) - 2)

        return pl.BlockSpec((None, None, *shape[2:]), at)

    matrix = pl.BlockSpec((None, None, sizes.piece, sizes.head_dim, sizes.state_dim), state)
    pending = tuple(waiting(part.shape) for part in inputs.pending)
    tokens = (of_row(part.shape) for part in (inputs.x, inputs.dt, inputs.b, inputs.c))
    in_specs = Inputs(*tokens, whole(inputs.a.shape), whole(inputs.d.shape), pending, matrix)
    return in_specs, Outputs(of_row(inputs.x.shape), matrix, pending if sizes.width > 1 else ())
