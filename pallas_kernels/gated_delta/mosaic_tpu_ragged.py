# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over ragged rows for TPUs, in one kernel: states pass by its chunks in VMEM.

A grid step takes some heads through one chunk (see `chunk`): it makes what needs no state, and what the state does, and
keeps the state for the next chunk of the sequence, which follows. A sequence's state is brought before its first chunk
and taken away behind its last, beside other steps' work. Tokens are laid out by chunk and head beforehand.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import tiles
from pallas_kernels.gated_delta.mosaic_tpu import DTYPES, MOST_VMEM_BYTES, heads_for
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks, cut_out, flat_index, waiting_rows
from pallas_kernels.storage import padded_bytes

# States of a grid step, of which there are two on their way in, two on their way out, and one in float32.
STATE_BYTES, VMEM_SLACK = 1 << 20, 12 << 20
WHOLE = CHUNK.bit_length() - 1


class _Numbers(NamedTuple):
    """Known before the kernel starts. `[1]` the layer; of each chunk `[N]`: its sequence and its slot, of padding the
    last chunk's; a sum of the flags below that hold of it; how many tokens wait in the slot."""

    layer: Any
    rows: Any
    slots: Any
    flags: Any
    num_pending: Any


_REAL, _FIRST, _LAST, _GOES_ON = 1, 2, 4, 8


class _Tokens(NamedTuple):
    """Of a chunk or of what is pending, by head: `keys [1, N, C, H]`, `values [1, V, C, Hv]`, `decays [1, V, C, H]` or
    `[1, V, 1, C]`, `strengths [1, V, 1, C]`."""

    keys: Any
    values: Any
    decays: Any
    strengths: Any


def supports(dtype: str, rows: int, columns: int, group: int, **facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if dtype not in DTYPES:
        return f"states of {dtype} cannot be loaded by a TPU, which loads {' and '.join(DTYPES)}; keep either"
    needed = 5 * padded_bytes((group, rows, columns), "float32")
    if needed + VMEM_SLACK > MOST_VMEM_BYTES:
        return f"{needed} bytes for the states of {group} heads are above the {MOST_VMEM_BYTES} that VMEM has for them"
    return ""


def delta_ragged(
    q: Float[Array, "T N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    interpret: Any = False,
) -> tuple[Float[Array, "T V Hv"], Float[Array, "L U V H Hv"]]:
    """See `op.delta_ragged`. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    num_tokens, key_heads = q.shape[:2]
    heads, height, columns = matrix.shape[2:]
    chunks = rows.chunks or cut_chunks(rows, num_tokens, CHUNK)
    index = chunks.token_index(num_tokens)
    cut = jax.tree.map(lambda leaf: cut_out(leaf, index), (q, tokens))
    queries, arrays = _by_head(cut[0]), _tokens_of(cut[1])
    waiting = waiting_rows(pending, layer, rows)
    arrays = arrays, (() if isinstance(waiting, tuple) else _tokens_of(waiting))
    numbers = _numbers(layer, chunks, rows)
    count = heads_for(heads, heads // key_heads, height, columns, jnp.float32, STATE_BYTES)
    blocks = heads // count
    specs = _specs(numbers, queries, arrays, blocks, (count, height, columns))
    out_shape = jax.ShapeDtypeStruct((chunks.lens.shape[0], *arrays[0].values.shape[1:]), q.dtype)
    inputs = queries, arrays
    out, matrix = pl.pallas_call(
        partial(_body, jax.tree.structure(inputs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(blocks, chunks.lens.shape[0]),
            in_specs=[*jax.tree.leaves(specs[0]), specs[2]],
            out_specs=[specs[1], specs[2]],
            scratch_shapes=[pltpu.VMEM((count, height, columns), jnp.float32)],
        ),
        out_shape=[out_shape, jax.ShapeDtypeStruct(matrix.shape, matrix.dtype)],
        input_output_aliases={len(numbers) + len(jax.tree.leaves(inputs)): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=_vmem_bytes(inputs, blocks, (count, height, columns)) + VMEM_SLACK,
        ),
        interpret=interpret,
        name="gated_delta_ragged",
    )(*numbers, *jax.tree.leaves(inputs), matrix)
    chunk, place = flat_index(chunks, num_tokens)
    out = jnp.swapaxes(out, 1, 2)
    out = cut_out(out.reshape(-1, *out.shape[2:]), chunk * chunks.size + place)
    real = jnp.arange(num_tokens, dtype=jnp.int32) < jnp.sum(rows.query_lens)
    return jnp.where(real[:, None, None], out, 0), matrix


delta_ragged_interpreted = partial(
    delta_ragged, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
)


def _by_head(x):
    """`[N, C, heads, H]` or `[N, C, heads]` in float32 with heads before tokens."""
    x = jnp.swapaxes(x, 1, 2).astype(jnp.float32)
    return x if x.ndim == 4 else x[:, :, None]


def _tokens_of(tokens: DeltaTokens) -> _Tokens:
    return _Tokens(*(_by_head(leaf) for leaf in (tokens.keys, tokens.values, tokens.decays, tokens.strengths)))


def _numbers(layer, chunks, rows: StateRows) -> _Numbers:
    real = chunks.lens > 0
    index = jnp.arange(real.shape[0], dtype=jnp.int32)
    owner = chunks.rows[jnp.maximum(jax.lax.cummax(jnp.where(real, index, -1)), 0)]
    facts = (real, _REAL), (chunks.first, _FIRST), (chunks.last, _LAST), (rows.starts[owner] > 0, _GOES_ON)
    flags = sum(jnp.where(fact, flag, 0) for fact, flag in facts).astype(jnp.int32)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    return _Numbers(layer, owner, rows.slots[owner], flags, rows.num_pending[owner])


def _specs(numbers: _Numbers, queries, arrays, blocks: int, state: tuple):
    """Block specs of the inputs, of the outputs and of the states."""

    def of_chunk(x):
        return pl.BlockSpec((1, x.shape[1] // blocks, *x.shape[2:]), lambda block, chunk, *_: (chunk, block, 0, 0))

    def of_row(x):
        shape = 1, x.shape[1] // blocks, *x.shape[2:]
        return pl.BlockSpec(shape, lambda block, chunk, *refs: (_Numbers(*refs).rows[chunk], block, 0, 0))

    def of_slot(block, chunk, *refs):
        return refs[0][0], _Numbers(*refs).slots[chunk], block, 0, 0

    new, waiting = arrays
    inputs = of_chunk(queries), (jax.tree.map(of_chunk, new), jax.tree.map(of_row, waiting))
    return inputs, of_chunk(new.values), pl.BlockSpec((1, 1, *state), of_slot)


def _vmem_bytes(inputs, blocks: int, state: tuple) -> int:
    """Bytes of VMEM for a call's blocks, each twice: one is worked on while another comes or goes."""
    wide = *jax.tree.leaves(inputs), inputs[1][0].values
    tokens = sum(padded_bytes((x.shape[1] // blocks, *x.shape[2:]), "float32") for x in wide)
    return 2 * tokens + 5 * padded_bytes(state, "float32")


def _product(left, right, turned: bool = False):
    numbers = (((1,), (1 if turned else 0,)), ((), ()))
    return jax.lax.dot_general(
        left, right, numbers, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _body(structure, *refs):
    numbers, (matrix, out, new_matrix, states) = _Numbers(*refs[:5]), refs[-4:]
    queries, (tokens, waiting) = jax.tree.unflatten(structure, refs[5:-4])
    chunk = pl.program_id(1)
    flags = numbers.flags[chunk]

    def each_key_head(visit):
        jax.lax.fori_loop(0, queries.shape[1], lambda head, carry: visit(head), None)

    group = states.shape[0] // queries.shape[1]

    @pl.when((flags & _FIRST) > 0)
    def _():
        states[...] = jnp.where((flags & _GOES_ON) > 0, matrix[0, 0].astype(jnp.float32), 0.0)

    if waiting:

        @pl.when((flags & _FIRST) > 0)
        def _():
            each_key_head(partial(_fold, waiting, numbers.num_pending[chunk], group, states))

    @pl.when((flags & _REAL) > 0)
    def _():
        each_key_head(partial(_take, queries, tokens, group, states, out))

    @pl.when((flags & _LAST) > 0)
    def _():
        new_matrix[0, 0] = states[...].astype(new_matrix.dtype)


def _fold(waiting: _Tokens, count, group: int, states, key_head):
    """Takes what is pending into the states that a head of keys serves, token by token as rows do."""
    for member in range(group):
        head = key_head * group + member
        state = states[head]
        for token in range(waiting.keys.shape[2]):
            place = pl.ds(token, 1)
            used = token < count
            key = jnp.where(used, waiting.keys[0, key_head, place], 0.0).T
            value = jnp.where(used, waiting.values[0, head, place], 0.0)
            strength = jnp.where(used, waiting.strengths[0, head, :, place], 0.0)
            decay = waiting.decays[0, head, :, place] if _by_number(waiting) else waiting.decays[0, head, place].T
            state = state * jnp.exp(jnp.where(used, decay, 0.0))
            wrong = value - jnp.sum(key * state, axis=0, keepdims=True)
            state = state + key * (strength * wrong)
        states[head] = state


def _take(queries, tokens: _Tokens, group: int, states, out, key_head):
    """Takes the states that a head of keys serves through a chunk."""
    q, k = queries[0, key_head], tokens.keys[0, key_head]
    shared = None
    for member in range(group):
        head = key_head * group + member
        strengths = tokens.strengths[0, head]
        if _by_number(tokens):
            shared = shared or (_product(q, k, True), _product(k, k, True))
            decays = tiles.decays_of(tokens.decays[0, head], _product)
            mixed, overlap = (square * decays.between for square in shared)
            since, until, kept = decays.since, decays.until, decays.kept
        else:
            decays = tokens.decays[0, head]
            mixed, overlap = _by_channel(q, k, decays)
            since, until = (each(decays, _product, WHOLE) for each in (tiles.until_each, tiles.after_each))
            kept = jnp.exp(jnp.sum(decays, axis=0, keepdims=True)).T
        i, j = tiles.places(CHUNK)
        lower = jnp.where(i > j, tiles.column(strengths) * overlap, 0.0)
        solved = tiles.inverse(lower, _product) * strengths
        state = states[head]
        written = _product(solved, tokens.values[0, head] - _product(since * k, state))
        found = _product(since * q, state) + _product(mixed, written)
        out[0, head] = found.astype(out.dtype)
        states[head] = kept * state + _product((until * k).T, written)


def _by_number(tokens: _Tokens) -> bool:
    """Whether a head has one decay a token: a row of them beside the strengths."""
    return tokens.decays.shape == tokens.strengths.shape


def _by_channel(q, k, decays):
    """Products of queries and of keys with keys, decayed channel by channel."""
    i, j = tiles.places(CHUNK)
    place = jax.lax.broadcasted_iota(jnp.int32, k.shape, 0) & (tiles.BAND - 1)

    def pairs(apart, carry):
        between, mixed, overlap = carry
        near = place >= apart
        between = between + jnp.where(near & (apart > 0), pltpu.roll(decays, jnp.maximum(apart - 1, 0), 0), 0.0)
        others = jnp.where(near, jnp.exp(between) * pltpu.roll(k, apart, 0), 0.0)
        here = i - j == apart
        mixed = mixed + jnp.where(here, jnp.sum(q * others, axis=1, keepdims=True), 0.0)
        overlap = overlap + jnp.where(here, jnp.sum(k * others, axis=1, keepdims=True), 0.0)
        return between, mixed, overlap

    squares = tiles.below_band(k, (q, k), decays, _product)
    return jax.lax.fori_loop(0, tiles.BAND, pairs, (jnp.zeros_like(k), *squares))[1:]
