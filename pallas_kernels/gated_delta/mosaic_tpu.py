# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over equal rows for TPUs: a state is read once and written once.

A grid step has some heads of one row's state in VMEM. It takes in the row's pending tokens and its first new one,
writes the states, and goes on with the drafts for their outputs alone, all on the vector unit: what a token does to a
state is too little for a matrix. States come and go beside the steps before and after; rows of padding name the state
of a neighbour that is there already, so that none is moved for them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.state_rows import StateRows, stored_rows, waiting_rows
from pallas_kernels.storage import padded_bytes

DTYPES = ("float32", "bfloat16")
# States of a grid step: enough that a copy of them takes longer than the step's own latency.
STATE_BYTES = 3 << 20
VMEM_SLACK, MOST_VMEM_BYTES = 4 << 20, 48 << 20
MOST_TOKENS = 16


class _Numbers(NamedTuple):
    """Known before the kernel starts. `[1]` the layer; of each row `[S]`: the slot of its state, or of a neighbour's if
    it is padding; whether it is a row (1), padding behind one (2) or before all (0); whether its sequence goes on."""

    layer: Any
    slots: Any
    kinds: Any
    goes_on: Any


class _Tokens(NamedTuple):
    """Of some heads of a row, pending tokens before the new ones: `keys [1, N, J + R, H]`, `queries [1, N, R, H]`,
    `values [1, V, J + R, Hv]`, `decays [1, V, J + R, H]` or how much is kept as numbers `[1, 1, V (J + R)]` of SMEM,
    and `strengths` as such numbers. Tokens that do not count keep all and write zeros."""

    keys: Any
    queries: Any
    values: Any
    decays: Any
    strengths: Any


def supports(tokens: int, dtype: str, rows: int, columns: int, group: int, **facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if dtype not in DTYPES:
        return f"states of {dtype} cannot be loaded by a TPU, which loads {' and '.join(DTYPES)}; keep either"
    if tokens > MOST_TOKENS:
        return f"{tokens} pending and new tokens a row are above {MOST_TOKENS}, which are taken in one by one"
    needed = 4 * padded_bytes((group, rows, columns), dtype)
    if needed + VMEM_SLACK > MOST_VMEM_BYTES:
        return f"{needed} bytes for the states of {group} heads are above the {MOST_VMEM_BYTES} that VMEM has for them"
    return ""


def heads_for(heads: int, group: int, rows: int, columns: int, dtype, most_bytes: int = STATE_BYTES) -> int:
    """Heads of a grid step: as many whole groups as divide all heads and whose states are no more than wanted."""
    fitting = [
        count
        for count in range(group, heads + 1, group)
        if heads % count == 0 and padded_bytes((count, rows, columns), dtype) <= most_bytes
    ]
    return max(fitting, default=group)


def delta_rows(
    q: Float[Array, "S R N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: Any = False,
) -> tuple[Float[Array, "S R V Hv"], Float[Array, "L U V H Hv"], Any]:
    """See `op.delta_rows`. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    waiting = waiting_rows(pending, layer, rows)
    arrays = _tokens_of(q, tokens, waiting, rows)
    heads, (height, columns), group = matrix.shape[2], matrix.shape[3:], matrix.shape[2] // q.shape[2]
    count = heads_for(heads, group, height, columns, matrix.dtype)
    blocks = heads // count
    numbers = _numbers(layer, rows)

    def state_index(row, block, *refs):
        kind, slots = _Numbers(*refs).kinds[row], _Numbers(*refs).slots
        block = jnp.where(kind == 1, block, jnp.where(kind == 2, blocks - 1, 0))
        return refs[0][0], slots[row], block, 0, 0

    def of_heads(shape):
        return pl.BlockSpec((1, shape[1] // blocks, *shape[2:]), lambda row, block, *_: (row, block, 0, 0))

    def numbers_of_row(shape):
        return pl.BlockSpec((1, *shape[1:]), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM)

    specs = _Tokens(*((of_heads if x.ndim == 4 else numbers_of_row)(x.shape) for x in arrays))
    state = pl.BlockSpec((1, 1, count, height, columns), state_index)
    out_shape = q.shape[0], heads, q.shape[1], columns
    out, matrix = pl.pallas_call(
        partial(_body, group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(q.shape[0], blocks),
            in_specs=[*specs, state],
            out_specs=[of_heads(out_shape), state],
        ),
        out_shape=[jax.ShapeDtypeStruct(out_shape, q.dtype), jax.ShapeDtypeStruct(matrix.shape, matrix.dtype)],
        input_output_aliases={len(numbers) + len(arrays): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(arrays, blocks, count, matrix) + VMEM_SLACK,
        ),
        interpret=interpret,
        name="gated_delta",
    )(*numbers, *arrays, matrix)
    if not isinstance(pending, tuple):
        new = jax.tree.map(lambda leaf: leaf[:, 1:], tokens)
        pending = stored_rows(pending, waiting, new, layer, rows)
    return jnp.swapaxes(out, 1, 2), matrix, pending


delta_rows_interpreted = partial(
    delta_rows, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
)


def vmem_bytes(arrays: _Tokens, blocks: int, count: int, matrix) -> int:
    """Bytes of VMEM that a call's blocks take, each twice: one is worked on while another comes or goes."""
    state = padded_bytes((count, *matrix.shape[3:]), matrix.dtype)
    wide = (x for x in (*arrays, arrays.values) if x.ndim == 4)
    return 2 * (2 * state + sum(padded_bytes((x.shape[1] // blocks, *x.shape[2:]), x.dtype) for x in wide))


def _numbers(layer, rows: StateRows) -> _Numbers:
    index = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    real = rows.query_lens > 0
    before = jax.lax.cummax(jnp.where(real, index, -1))
    source = jnp.where(before < 0, jnp.argmax(real).astype(jnp.int32), before)
    kinds = jnp.where(real, 1, jnp.where(before < 0, 0, 2)).astype(jnp.int32)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    return _Numbers(layer, rows.slots[source], kinds, (rows.starts > 0).astype(jnp.int32))


def _tokens_of(q, tokens: DeltaTokens, waiting, rows: StateRows) -> _Tokens:
    """The tokens by head, in float32."""
    parts = [(tokens, jnp.ones(q.shape[:2], jnp.bool_))]
    if not isinstance(waiting, tuple):
        places = jnp.arange(waiting.strengths.shape[1], dtype=jnp.int32)
        parts.insert(0, (waiting, places < rows.num_pending[:, None]))

    def by_head(name):
        masked = [_masked(getattr(part, name), used) for part, used in parts]
        return jnp.swapaxes(jnp.concatenate(masked, axis=1), 1, 2)

    def as_numbers(x):
        return x.reshape(x.shape[0], 1, -1)

    decays = by_head("decays")
    decays = decays if tokens.per_channel else as_numbers(jnp.exp(decays))
    queries = jnp.swapaxes(q, 1, 2).astype(jnp.float32)
    return _Tokens(by_head("keys"), queries, by_head("values"), decays, as_numbers(by_head("strengths")))


def _masked(leaf, used):
    return jnp.where(used.reshape(*used.shape, *(1,) * (leaf.ndim - 2)), leaf.astype(jnp.float32), 0)


def _body(group: int, *refs):
    numbers, tokens = _Numbers(*refs[:4]), _Tokens(*refs[4:9])
    matrix, out, new_matrix = refs[9:]
    row = pl.program_id(0)

    @pl.when(numbers.kinds[row] != 1)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(numbers.kinds[row] == 1)
    def _():
        goes_on = numbers.goes_on[row] > 0

        def visit(key_head, carry):
            _key_head(key_head, group, goes_on, tokens, matrix, out, new_matrix)
            return carry

        jax.lax.fori_loop(0, tokens.keys.shape[1], visit, None)


def _key_head(key_head, group: int, goes_on, tokens: _Tokens, matrix, out, new_matrix):
    """Takes a row's tokens through the states of the heads that one head of keys serves."""
    # Turned, so that a token's numbers lie along the rows of a state.
    keys, queries = tokens.keys[0, key_head].T, tokens.queries[0, key_head].T
    count, width = keys.shape[1], queries.shape[1]
    first = pl.program_id(1) * matrix.shape[2]
    for member in range(group):
        head = key_head * group + member
        state = jnp.where(goes_on, matrix[0, 0, head].astype(jnp.float32), 0)
        per_channel = len(tokens.decays.shape) == 4
        kept = jnp.exp(tokens.decays[0, head]).T if per_channel else None
        for token in range(count):
            place = (first + head) * count + token
            decay = kept[:, token : token + 1] if per_channel else tokens.decays[0, 0, place]
            key = keys[:, token : token + 1]
            state = state * decay
            wrong = tokens.values[0, head, token : token + 1] - jnp.sum(key * state, axis=0, keepdims=True)
            state = state + key * (tokens.strengths[0, 0, place] * wrong)
            new = token - (count - width)
            if new >= 0:
                found = jnp.sum(queries[:, new : new + 1] * state, axis=0, keepdims=True)
                out[0, head, new : new + 1] = found.astype(out.dtype)
            if new == 0:
                new_matrix[0, 0, head] = state.astype(new_matrix.dtype)
