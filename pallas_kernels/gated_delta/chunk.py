# SPDX-License-Identifier: Apache-2.0
"""A run of tokens of one sequence at once: the delta rule as matrix products (Yang et al. 2024, the WY form).

With `A` the strictly lower triangle of `b_i k_i^T D_ij k_j`, where `D_ij` is what tokens j+1 to i leave of what j
wrote, the rows that the tokens add to the state are `(I + A)^-1 (b v - b k D_i0 M)`: the inverse depends on no state,
so it can be made for all runs before the first state is known. Decays are summed over just the tokens between two,
never as differences of longer sums, so that strong ones cost no digits, and only ever lower numbers: nothing overflows.

Heads lie as `[N, G, ...]`, those of keys by those of values that each serves; a run's length is a power of two.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.op import DeltaTokens

# Tokens whose decays are taken one pair at a time; wider triangles are made of products.
PAIRS = 4
HIGHEST = jax.lax.Precision.HIGHEST


@struct.dataclass
class Run:
    """All of a run of `C` tokens that does not depend on the state before it. `taken` of them stay in the state after.

    `reads [N, G, 2 C, H]`: what reads the state for the tokens' corrections, then for their outputs; `values
    [N, G, C, Hv]`, what the tokens would write to an empty state; `mixed [N, G, C, C]`, how outputs read what is
    written; `keys [N, G, taken, H]`, where it stays; `kept [N, G, 1 or H]`, what is left of the state before.
    """

    reads: Any
    values: Any
    mixed: Any
    keys: Any
    kept: Any


def run_of(q: Float[Array, "C N H"], tokens: DeltaTokens, used: Any, taken: int) -> Run:
    """The run of these tokens; what is not in `used [C]` does nothing and may hold anything."""
    count, key_heads, _ = q.shape
    q, k, values, decays, strengths = (
        _by_head(array, key_heads, used) for array in (q, tokens.keys, tokens.values, tokens.decays, tokens.strengths)
    )
    strengths = strengths[..., None]
    if tokens.per_channel:
        read, overlap, since, until = _by_channel(q, k, decays, taken)
    else:
        read, overlap, since, until = _by_number(q, k, decays, taken)
    solved = inverse(strengths * overlap * _lower(count, strict=True))
    writes = jnp.concatenate([strengths * k * since, strengths * values], axis=-1)
    solved = jnp.einsum("ngij,ngjh->ngih", solved, writes, precision=HIGHEST)
    width = q.shape[-1]
    reads = jnp.concatenate([solved[..., :width], q * since], axis=2)
    return Run(reads, solved[..., width:], read, k[:, :, :taken] * until, since[:, :, taken - 1])


def after_run(state: Float[Array, "N G H Hv"], run: Run) -> tuple[Float[Array, "N G C Hv"], Float[Array, "N G H Hv"]]:
    """Outputs of the run's tokens and the state after those that are taken."""
    count, taken = run.values.shape[2], run.keys.shape[2]
    found = jnp.einsum("ngch,nghv->ngcv", run.reads, state, precision=HIGHEST)
    written = run.values - found[:, :, :count]
    out = found[:, :, count:] + jnp.einsum("ngij,ngjv->ngiv", run.mixed, written, precision=HIGHEST)
    added = jnp.einsum("ngch,ngcv->nghv", run.keys, written[:, :, :taken], precision=HIGHEST)
    return out, run.kept[..., None] * state + added


def _by_head(array, key_heads, used):
    """`[C, heads, ...]` as float32 `[N, G, C, ...]`, zero where a token is not used."""
    wide = jnp.where(used.reshape(-1, *(1,) * (array.ndim - 1)), array, 0).astype(jnp.float32)
    return jnp.moveaxis(wide.reshape(wide.shape[0], key_heads, -1, *array.shape[2:]), 0, 2)


def _lower(count: int, strict: bool = False):
    return np.tril(np.ones((count, count), np.float32), -1 if strict else 0)


def _by_number(q, k, decays, taken):
    """For decays `[N, G, C]`: products of queries and of keys with keys, decayed, `[N, G, C, C]`, and what is left of
    the state until each token, and of what it writes until the last taken one, `[N, G, C, 1]`."""
    count = decays.shape[-1]
    between = decays[..., None] * _lower(count, strict=True)
    between = jnp.einsum("il,nglj->ngij", _lower(count), between, precision=HIGHEST)
    decay = jnp.where(_lower(count) > 0, jnp.exp(between), 0)
    since = jnp.exp(jnp.einsum("il,ngl->ngi", _lower(count), decays, precision=HIGHEST))
    products = jnp.einsum("xngih,ngjh->xngij", jnp.stack([q, k]), k, precision=HIGHEST) * decay
    return products[0], products[1], since[..., None], decay[:, :, taken - 1, :taken, None]


def _by_channel(q, k, decays, taken):
    """The same for decays `[N, G, C, H]`, where there is one for each channel of the keys."""
    count = decays.shape[2]
    both = jnp.broadcast_to(jnp.stack([q, k]), (2, *decays.shape))
    products = _decayed_products(both, jnp.broadcast_to(k, decays.shape), decays)
    since = jnp.exp(jnp.einsum("il,nglh->ngih", _lower(count), decays, precision=HIGHEST))
    later = _lower(taken, strict=True).T
    until = jnp.exp(jnp.einsum("jl,nglh->ngjh", later, decays[:, :, :taken], precision=HIGHEST))
    return products[0], products[1], since, until


def _decayed_products(left, k, decays):
    """`sum_h left_ih k_jh exp(sum_{j < l <= i} decays_lh)` for j <= i, else 0: `[X, N, G, C, C]`.

    Blocks on the diagonal are joined two by two. Below them, what j leaves until its block ends and what is left from
    there to i are factors of the two sides.
    """
    count = k.shape[2]
    size = min(PAIRS, count)
    x, y, g = (_blocks(array, size) for array in (left, k, decays))
    between = g[..., None, :] * _lower(size, strict=True)[..., None]
    between = jnp.einsum("il,ngbljh->ngbijh", _lower(size), between, precision=HIGHEST)
    weighed = jnp.where(_lower(size)[..., None] > 0, jnp.exp(between), 0) * y[..., None, :, :]
    found = jnp.sum(x[..., :, None, :] * weighed, axis=-1)
    while size < count:
        x, y, g = (_blocks(array, size) for array in (left, k, decays))
        upto = jnp.einsum("jl,ngblh->ngbjh", _lower(size, strict=True).T, g[:, :, 0::2], precision=HIGHEST)
        past = jnp.einsum("il,ngblh->ngbih", _lower(size), g[:, :, 1::2], precision=HIGHEST)
        rows, columns = x[:, :, :, 1::2] * jnp.exp(past), y[:, :, 0::2] * jnp.exp(upto)
        below = jnp.einsum("xngbih,ngbjh->xngbij", rows, columns, precision=HIGHEST)
        found = _joined(found, below)
        size *= 2
    return found[..., 0, :, :]


def inverse(lower: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """`(I + lower)^-1` of a strictly lower triangle: of small blocks by their series, then joined two by two.

    The joins are those of substitution by blocks, whose error does not grow with the powers of `lower`.
    """
    count = lower.shape[-1]
    if count == 1:
        return jnp.ones_like(lower)
    size = min(PAIRS, count)
    small = _diagonal(lower, size)
    one = np.eye(size, dtype=np.float32)
    square = jnp.matmul(small, small, precision=HIGHEST)
    found = jnp.matmul(one - small, one + square, precision=HIGHEST)
    while size < count:
        wide = _diagonal(lower, 2 * size)[..., size:, :size]
        before, after = found[..., 0::2, :, :], found[..., 1::2, :, :]
        below = -jnp.matmul(jnp.matmul(after, wide, precision=HIGHEST), before, precision=HIGHEST)
        found = _joined(found, below)
        size *= 2
    return found[..., 0, :, :]


def _blocks(array, size):
    """`[..., C, H]` as `[..., C / size, size, H]`."""
    return array.reshape(*array.shape[:-2], -1, size, array.shape[-1])


def _diagonal(square, size):
    """The blocks on the diagonal, `[..., C / size, size, size]`: each begins `size (C + 1)` numbers after the last."""
    lead, width = square.shape[:-2], square.shape[-1]
    flat = jnp.pad(square.reshape(*lead, -1), [*[(0, 0)] * len(lead), (0, width)])
    bands = flat.reshape(*lead, width // size, -1)[..., : size * width]
    return bands.reshape(*lead, -1, size, width)[..., :size]


def _joined(diagonal, below):
    """Blocks twice as wide, of pairs on the `diagonal [..., 2 B, n, n]` and what is `below [..., B, n, n]`."""
    above = jnp.concatenate([diagonal[..., 0::2, :, :], jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([below, diagonal[..., 1::2, :, :]], axis=-1)], axis=-2)
