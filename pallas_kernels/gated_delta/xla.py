# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain XLA operations: runs of tokens as matrix products, in place on the states."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.chunk import after_run, run_of
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.shapes import next_power_of_two
from pallas_kernels.state_rows import CHUNK, IN_BOUNDS, StateRows, begun, cut_chunks, stored_rows, waiting_rows


def delta_rows(
    q: Float[Array, "S R N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
) -> tuple[Float[Array, "S R V Hv"], Float[Array, "L U V H Hv"], Any]:
    """See `op.delta_rows`. Pending and new tokens are one run: it reads the state once, and writes it once."""
    num_rows, width = q.shape[:2]
    matrix, pending = begun((matrix, pending), layer, rows)
    waiting = waiting_rows(pending, layer, rows)
    most = 0 if isinstance(waiting, tuple) else waiting.strengths.shape[1]
    length = next_power_of_two(most + width)
    index = jnp.arange(length, dtype=jnp.int32)
    used = (index < rows.num_pending[:, None]) | ((index >= most) & (index < most + width))
    packed = tokens if not most else jax.tree.map(_beside, waiting, tokens)
    queries = jnp.pad(q, ((0, 0), (most, length - most - width), (0, 0), (0, 0)))
    packed = jax.tree.map(partial(_padded, length=length), packed)
    run = jax.vmap(partial(run_of, taken=most + 1))(queries, packed, used)
    out, state = jax.vmap(after_run)(_states(matrix, layer, rows, q.shape[2]), run)
    out = out[:, :, :, most : most + width]
    out = jnp.moveaxis(out, 3, 1).reshape(num_rows, width, *tokens.values.shape[2:]).astype(q.dtype)
    if most:
        new = jax.tree.map(lambda leaf: leaf[:, 1:], tokens)
        pending = stored_rows(pending, waiting, new, layer, rows)
    return out, _written(matrix, state, layer, rows), pending


def delta_ragged(
    q: Float[Array, "T N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
) -> tuple[Float[Array, "T V Hv"], Float[Array, "L U V H Hv"]]:
    """See `op.delta_ragged`. All that needs no state is made for all chunks at once, before the states pass by."""
    return ragged(q, tokens, matrix, pending, layer, rows, at_once=True)


def ragged(q, tokens, matrix, pending, layer, rows, at_once: bool):
    """`delta_ragged` with what needs no state made for all chunks `at_once`, or for each when its turn comes."""
    num_tokens = q.shape[0]
    chunks = rows.chunks or cut_chunks(rows, num_tokens, CHUNK)
    # Room for a whole chunk wherever one starts.
    flat = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, chunks.size), *[(0, 0)] * (leaf.ndim - 1))), (q, tokens))

    def run_at(start, length):
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, chunks.size), flat)
        return run_of(*part, jnp.arange(chunks.size, dtype=jnp.int32) < length, chunks.size)

    runs = jax.vmap(run_at)(chunks.token_starts, chunks.lens) if at_once else ()

    def step(index, carry):
        states, out = carry
        row, start = chunks.rows[index], chunks.token_starts[index]
        run = jax.tree.map(lambda leaf: leaf[index], runs) if at_once else run_at(start, chunks.lens[index])
        found, state = after_run(states[row], run)
        # Past its tokens a chunk writes what the next one, starting there, overwrites.
        found = jnp.moveaxis(found, 2, 0).reshape(chunks.size, *out.shape[1:])
        return states.at[row].set(state), jax.lax.dynamic_update_slice_in_dim(out, found, start, axis=0)

    matrix = begun(matrix, layer, rows)
    states, waiting = _states(matrix, layer, rows, q.shape[1]), waiting_rows(pending, layer, rows)
    if not isinstance(waiting, tuple):
        states = _folded(states, waiting, rows)
    out = jnp.zeros((num_tokens + chunks.size, *tokens.values.shape[1:]), jnp.float32)
    states, out = jax.lax.fori_loop(0, jnp.sum(chunks.lens > 0, dtype=jnp.int32), step, (states, out))
    real = jnp.arange(num_tokens, dtype=jnp.int32) < jnp.sum(rows.query_lens)
    out = jnp.where(real[:, None, None], out[:num_tokens], 0).astype(q.dtype)
    return out, _written(matrix, states, layer, rows)


def _folded(states, waiting, rows):
    """The states after each row's accepted pending tokens."""
    most = waiting.strengths.shape[1]
    length = next_power_of_two(most)
    packed = jax.tree.map(partial(_padded, length=length), waiting)
    used = jnp.arange(length, dtype=jnp.int32) < rows.num_pending[:, None]
    run = jax.vmap(partial(run_of, taken=most))(jnp.zeros_like(packed.keys), packed, used)
    return jax.vmap(after_run)(states, run)[1]


def _states(matrix, layer, rows, key_heads):
    """Each row's state `[S, N, G, H, Hv]` in float32."""
    states = matrix.at[layer, rows.slots].get(**IN_BOUNDS).astype(jnp.float32)
    return states.reshape(len(states), key_heads, -1, *states.shape[2:])


def _written(matrix, states, layer, rows):
    states = states.reshape(len(states), *matrix.shape[2:]).astype(matrix.dtype)
    return matrix.at[layer, rows.slots].set(states, **IN_BOUNDS)


def _beside(waiting, tokens):
    return jnp.concatenate([waiting, tokens.astype(waiting.dtype)], axis=1)


def _padded(leaf, length):
    return jnp.pad(leaf, ((0, 0), (0, length - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)))
