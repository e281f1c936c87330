# SPDX-License-Identifier: Apache-2.0
"""Causal convolution in plain XLA operations: a sum of shifted rows, in place on the tails."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.state_rows import IN_BOUNDS, StateRows, begun, offsets_in_rows, stored_rows, waiting_rows


def conv_rows(
    x: Float[Array, "S R C"],
    weight: Float[Array, "W C"],
    bias: Any,
    tail: Float[Array, "L U W1 C"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    silu: bool,
) -> tuple[Float[Array, "S R C"], Float[Array, "L U W1 C"], Any]:
    """See `op.conv_rows`."""
    width = tail.shape[2]
    tail, pending = begun((tail, pending), layer, rows)
    waiting = waiting_rows(pending, layer, rows)
    window = jnp.concatenate([_history(tail, waiting, layer, rows), x], axis=1)
    out = _finished(_taps(window, weight), bias, silu, x.dtype)
    tail = tail.at[layer, rows.slots].set(window[:, 1 : width + 1], **IN_BOUNDS)
    if not isinstance(pending, tuple):
        pending = stored_rows(pending, waiting, x[:, 1:], layer, rows)
    return out, tail, pending


def conv_ragged(
    x: Float[Array, "T C"],
    weight: Float[Array, "W C"],
    bias: Any,
    tail: Float[Array, "L U W1 C"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    silu: bool,
) -> tuple[Float[Array, "T C"], Float[Array, "L U W1 C"]]:
    """See `op.conv_ragged`. All tokens are summed as if sequences began with zeros; the first `W - 1` of each are then
    done again with what was kept, in the same order of sums."""
    num_tokens, width = x.shape[0], tail.shape[2]
    tail = begun(tail, layer, rows)
    history = _history(tail, waiting_rows(pending, layer, rows), layer, rows)
    total = _finished(_begun(x, weight, offsets_in_rows(rows, num_tokens)), bias, silu, x.dtype)

    step = jnp.arange(width, dtype=jnp.int32)
    begins = jnp.where(step < rows.query_lens[:, None], rows.query_starts[:, None] + step, num_tokens)
    first = x.at[begins].get(mode="clip", wrap_negative_indices=False)
    redone = _finished(_taps(jnp.concatenate([history, first], axis=1), weight)[:, :width], bias, silu, x.dtype)
    total = total.at[begins.reshape(-1)].set(redone.reshape(-1, x.shape[1]), mode="drop", wrap_negative_indices=False)

    # The last inputs, as far back as the history where a sequence's tokens are fewer.
    back = rows.query_lens[:, None] - width + step
    new = x.at[jnp.maximum(rows.query_starts[:, None] + back, 0)].get(mode="clip", wrap_negative_indices=False)
    old = jnp.take_along_axis(history, jnp.clip(width + back, 0, width - 1)[..., None], axis=1)
    tail = tail.at[layer, rows.slots].set(jnp.where((back >= 0)[..., None], new, old), **IN_BOUNDS)
    return total, tail


def _history(tail, waiting, layer, rows):
    """The `W - 1` inputs before each row's new tokens `[S, W - 1, C]`, accepted pending ones among them."""
    width = tail.shape[2]
    kept = tail.at[layer, rows.slots].get(**IN_BOUNDS)
    if isinstance(waiting, tuple):
        return kept
    both = jnp.concatenate([kept, waiting], axis=1)
    index = jnp.clip(rows.num_pending, 0, waiting.shape[1])[:, None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.take_along_axis(both, index[..., None], axis=1)


def _taps(window, weight):
    """Sums `[S, n, C]` in float32 over all runs of `W` of the inputs `[S, W - 1 + n, C]`."""
    count = window.shape[1] - weight.shape[0] + 1
    wide, weight = window.astype(jnp.float32), weight.astype(jnp.float32)
    total = wide[:, :count] * weight[0]
    for tap in range(1, weight.shape[0]):
        total += wide[:, tap : tap + count] * weight[tap]
    return total


def _begun(x, weight, offsets):
    """Sums `[T, C]` in float32 over the inputs of a token's own sequence in this step, `offsets [T]` tokens into it."""
    num_tokens, width = x.shape[0], weight.shape[0] - 1
    padded, weight = jnp.pad(x, ((width, 0), (0, 0))), weight.astype(jnp.float32)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width + 1):
        part = padded[tap : tap + num_tokens].astype(jnp.float32)
        own = (offsets >= width - tap)[:, None]
        total += jnp.where(own, part, 0) * weight[tap]
    return total


def _finished(total, bias, silu, dtype):
    if not isinstance(bias, tuple):
        total = total + bias.astype(jnp.float32)
    return (jax.nn.silu(total) if silu else total).astype(dtype)
