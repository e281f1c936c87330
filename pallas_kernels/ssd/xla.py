# SPDX-License-Identifier: Apache-2.0
"""State space duality in plain XLA operations: runs of tokens as masked matrix products (Dao and Gu 2024, sec. 6)."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.state_rows import (
    CHUNK,
    IN_BOUNDS,
    StateRows,
    begun,
    cut_chunks,
    stored_rows,
    waiting_rows,
)


def take_rows(
    tokens: SsdTokens, heads: SsdHeads, storage: SsdStorage, layer: int | Int[Array, ""], rows: StateRows
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_rows`."""
    num_pending = storage.num_pending
    storage = begun(storage, layer, rows)
    new, waiting, run = joined_rows(tokens, storage, layer, rows)
    state = _first_states(storage, layer, rows)
    if run.x.shape[1] == 1:
        outputs, state = jax.vmap(_one_token, (None, 0, 0))(heads.a, state, new)
    else:
        outputs, state = jax.vmap(partial(take_run, heads.a, num_taken=num_pending + 1))(state, run)
        outputs = outputs[:, num_pending:]
    outputs = (outputs + heads.d[:, None] * new.x).reshape(tokens.x.shape)
    return outputs, _stored(with_drafts(storage, waiting, new, layer, rows), layer, rows, state)


def joined_rows(tokens: SsdTokens, storage: SsdStorage, layer, rows: StateRows):
    """Float32 tokens of equal rows `[S, Q, ...]`, zeros where there are none; what waits in the rows' slots, for
    `with_drafts`; and as one run `[S, J + Q, ...]` the pending rows, zeros for those that do not count, and the tokens.
    """
    width = rows.max_query_len
    there = jnp.arange(width, dtype=jnp.int32) < rows.query_lens[:, None]
    new = jax.tree.map(lambda part: _masked(part.reshape(-1, width, *part.shape[1:]), there), _wide(tokens))
    if not storage.num_pending:
        return new, [], new
    waiting = waiting_rows(list(storage.pending), layer, rows)
    run = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), _counted(waiting, rows), new)
    return new, waiting, run


def with_drafts(storage: SsdStorage, waiting: list[Array], new: SsdTokens, layer, rows: StateRows) -> SsdStorage:
    """The storage with all but the first of each row's `new` tokens pending."""
    drafts = [part[:, 1:] for part in (new.x, new.dt, new.b)]
    pending = stored_rows(list(storage.pending), waiting, drafts, layer, rows) if waiting else ()
    return storage.replace(pending=tuple(pending))


def take_ragged(
    tokens: SsdTokens, heads: SsdHeads, storage: SsdStorage, layer: int | Int[Array, ""], rows: StateRows
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """See `op.ssd_ragged`. Walks the chunks that are there, one after another."""
    num_tokens = tokens.x.shape[0]
    chunks = rows.chunks if rows.chunks != () else cut_chunks(rows, num_tokens, CHUNK)
    size = chunks.size
    storage = storage.replace(matrix=begun(storage.matrix, layer, rows))
    state = _first_states(storage, layer, rows)
    if storage.num_pending:
        run = _counted(waiting_rows(list(storage.pending), layer, rows), rows)
        _, state = jax.vmap(partial(take_run, heads.a, num_taken=storage.num_pending))(state, run)
    # The last chunk may end past the step.
    padded = jax.tree.map(lambda part: jnp.pad(part, [(0, size), *[(0, 0)] * (part.ndim - 1)]), _wide(tokens))

    def visit(index, carry):
        state, outputs = carry
        start, row = chunks.token_starts[index], chunks.rows[index]
        there = jnp.arange(size, dtype=jnp.int32) < chunks.lens[index]
        run = jax.tree.map(lambda part: _masked(_sliced(part, start, size), there), padded)
        given, after = take_run(heads.a, state[row], run, size)
        given = jnp.where(there[:, None, None], given + heads.d[:, None] * run.x, _sliced(outputs, start, size))
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, given, start, 0, allow_negative_indices=False)
        return state.at[row].set(after, **IN_BOUNDS), outputs

    count = jnp.sum(chunks.lens > 0, dtype=jnp.int32)
    start = state, jnp.zeros(padded.x.shape, jnp.float32)
    state, outputs = jax.lax.fori_loop(jnp.zeros((), jnp.int32), count, visit, start)
    return outputs[:num_tokens], _stored(storage, layer, rows, state)


def take_run(a: Float[Array, " N"], state: Float[Array, "N H Z"], run: SsdTokens, num_taken: int):
    """Outputs `[C, N, H]` of a run of tokens after `state`, without the skip, and the state after `num_taken` of them.

    A token of zeros changes nothing.
    """
    count, num_heads, width = run.x.shape
    num_groups = run.b.shape[1]
    by_group = (num_groups, num_heads // num_groups)
    passed = jnp.cumsum(run.dt * a, axis=0)
    order = jnp.arange(count, dtype=jnp.int32)
    since = jnp.where((order[:, None] >= order)[..., None], passed[:, None] - passed, -jnp.inf)
    weight = jnp.exp(since) * run.dt
    weight = weight.reshape(count, count, *by_group)
    x = run.x.reshape(count, *by_group, width)
    state = state.reshape(*by_group, width, -1)
    score = _einsum("ikz,jkz->ijk", run.c, run.b)
    outputs = _einsum("ijkm,jkmh->ikmh", score[..., None] * weight, x)
    kept = jnp.exp(passed).reshape(count, *by_group, 1)
    outputs = outputs + kept * _einsum("ikz,kmhz->ikmh", run.c, state)
    end = passed[num_taken - 1]
    left = (jnp.exp(end - passed[:num_taken]) * run.dt[:num_taken]).reshape(num_taken, *by_group, 1)
    gained = _einsum("jkmh,jkz->kmhz", left * x[:num_taken], run.b[:num_taken])
    state = jnp.exp(end).reshape(*by_group, 1, 1) * state + gained
    return outputs.reshape(count, num_heads, width), state.reshape(num_heads, width, -1)


def _one_token(a, state, new: SsdTokens):
    """The output `[1, N, H]` of one token, without the skip, and the state after it."""
    x, dt, b, c = new.x[0], new.dt[0], new.b[0], new.c[0]
    repeat = partial(jnp.repeat, repeats=x.shape[0] // b.shape[0], axis=0)
    state = jnp.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[..., None] * repeat(b)[:, None]
    return jnp.sum(state * repeat(c)[:, None], axis=-1)[None], state


def _first_states(storage: SsdStorage, layer, rows: StateRows):
    """Float32 states `[S, N, H, Z]` before the step, of storage that is `begun`; zeros for padding."""
    state = storage.matrix.at[layer, rows.slots].get(**IN_BOUNDS).astype(jnp.float32)
    return jnp.where((rows.query_lens > 0)[:, None, None, None], state, 0)


def _stored(storage: SsdStorage, layer, rows: StateRows, state) -> SsdStorage:
    matrix = storage.matrix.at[layer, rows.slots].set(state.astype(storage.matrix.dtype), **IN_BOUNDS)
    return storage.replace(matrix=matrix)


def _counted(waiting: list[Array], rows: StateRows) -> SsdTokens:
    """The rows that wait `[S, J, ...]`, those that do not count as zeros."""
    counts = jnp.where((rows.starts > 0) & (rows.query_lens > 0), rows.num_pending, 0)
    x, dt, b = waiting
    there = jnp.arange(x.shape[1], dtype=jnp.int32) < counts[:, None]
    x, dt, b = (_masked(part, there) for part in (x, dt, b))
    # Their outputs were given before; nobody asks again.
    return SsdTokens(x, dt, b, jnp.zeros_like(b))


def _masked(part: Array, there: Array) -> Array:
    return jnp.where(there.reshape(*there.shape, *[1] * (part.ndim - there.ndim)), part, 0)


def _sliced(part: Array, start, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(part, start, size, allow_negative_indices=False)


def _wide(tokens: SsdTokens) -> SsdTokens:
    return jax.tree.map(lambda part: part.astype(jnp.float32), tokens)


def _einsum(form: str, *parts: Array) -> Array:
    # The state adds up what is rounded off at every token: TPUs and GPUs must not multiply in fewer bits.
    return jnp.einsum(form, *parts, precision=jax.lax.Precision.HIGHEST)
