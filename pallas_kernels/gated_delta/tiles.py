# SPDX-License-Identifier: Apache-2.0
"""What a chunk of tokens makes of its decays and keys, as functions of tiles that trace inside any kernel.

The mathematics is `chunk`'s; here nothing is sliced, moved or joined, which a GPU's tiles know nothing of: a block of
a square is the square under a mask. `product(x, y)` is the kernel's matrix product, true to float32. Rows are `[1, C]`,
columns `[C, 1]`; tokens that do not count decay by nothing and have keys and strengths of zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Tokens whose decays by channel are taken one pair at a time.
BAND = 16


def summed(count: int, size: int, after: bool) -> np.ndarray:
    """A square of ones where a column's token counts for a row's: of the same run of `size` tokens, and after it, or
    else until it."""
    i, j = np.indices((count, count))
    return np.float32((i // size == j // size) & (j > i if after else j <= i))


class Decays(NamedTuple):
    """`between [C, C]`, what tokens j+1 to i leave, zero above the diagonal; `since`, what is left of the state until
    each token, and `until`, of what each writes until the last, `[C, 1]`; `kept`, of the state by all, `[1, 1]`."""

    between: Any
    since: Any
    until: Any
    kept: Any


def places(count: int) -> tuple[Any, Any]:
    """The rows of a square as a column, and its columns as a row."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return rows, jax.lax.broadcasted_iota(jnp.int32, (1, count), 1)


def column(row: Any) -> Any:
    """A row `[1, C]` as a column."""
    i, j = places(row.shape[1])
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def decays_of(row: Any, product: Callable) -> Decays:
    """Of the logarithms of what each token keeps, `[1, C]`."""
    i, j = places(row.shape[1])
    past = jnp.where(j <= i, row, 0.0)
    between = product(past, jnp.where(i > j, 1.0, 0.0))
    return Decays(
        between=jnp.where(j <= i, jnp.exp(between), 0.0),
        since=jnp.exp(jnp.sum(past, axis=1, keepdims=True)),
        until=jnp.exp(jnp.sum(jnp.where(j > i, row, 0.0), axis=1, keepdims=True)),
        kept=jnp.exp(jnp.sum(row, axis=1, keepdims=True)),
    )


def until_each(decays: Any, product: Callable, level: Any) -> Any:
    """What is left until each token, itself included, since its run of `2^level` tokens began; of `decays [C, H]` by
    channel."""
    i, j = places(decays.shape[0])
    return jnp.exp(product(jnp.where((j <= i) & _same(i, j, level), 1.0, 0.0), decays))


def after_each(decays: Any, product: Callable, level: Any) -> Any:
    """What tokens after each leave until its run of `2^level` tokens ends; of `decays [C, H]`."""
    i, j = places(decays.shape[0])
    return jnp.exp(product(jnp.where((j > i) & _same(i, j, level), 1.0, 0.0), decays))


def below_band(keys: Any, others: tuple, decays: Any, product: Callable) -> tuple:
    """`sum_h x_ih k_jh exp(sum_{j < l <= i} decays_lh)` of each x of `others [C, H]` with all keys of earlier runs of
    `BAND` tokens, zero elsewhere: `[C, C]` each."""
    count = keys.shape[0]
    i, j = places(count)

    def join(level, found):
        past, columns = until_each(decays, product, level), keys * after_each(decays, product, level)
        mask = pairs(i, j, level)
        return tuple(
            jnp.where(mask, product(x * past, columns.T), total) for x, total in zip(others, found, strict=True)
        )

    found = tuple(jnp.zeros((count, count), jnp.float32) for _ in others)
    return jax.lax.fori_loop(BAND.bit_length() - 1, count.bit_length() - 1, join, found)


def inverse(lower: Any, product: Callable) -> Any:
    """`(I + lower)^-1` of a strictly lower triangle `[C, C]`: inverses of blocks on the diagonal joined two by two, as
    substitution by blocks has it."""
    count = lower.shape[0]
    i, j = places(count)

    def join(level, found):
        below = jnp.where(pairs(i, j, level), lower, 0.0)
        return found - product(product(found, below), found)

    ones = jnp.where(i == j, 1.0, 0.0) - jnp.where(pairs(i, j, 0), lower, 0.0)
    return jax.lax.fori_loop(1, count.bit_length() - 1, join, ones)


def _run(place: Any, level: Any) -> Any:
    """The run of `2^level` tokens that a place is in."""
    return jax.lax.shift_right_logical(place, jnp.full_like(place, level))


def _same(i: Any, j: Any, level: Any) -> Any:
    return _run(i, level) == _run(j, level)


def pairs(i: Any, j: Any, level: Any) -> Any:
    """Where the row's run of `2^level` tokens follows the column's, and they are a pair of the next level."""
    return (_run(i, level) == _run(j, level) + 1) & _same(i, j, level + 1)
