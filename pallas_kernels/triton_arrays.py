# SPDX-License-Identifier: Apache-2.0
"""What Triton asks of arrays: sides that are powers of two, offsets that it can count."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_formats.registry import format_named
from pallas_kernels.shapes import next_power_of_two
from pallas_kernels.storage import beyond_signed_offsets

# The narrowest part of a head, filled with zeros. Compiled for H200, narrower ones take more matrix instructions: one
# of 80 as 64 and 16 takes 80 and 187 registers, as 64 and 32 it takes 24 and 112, as 128 it takes 32 and 112.
NARROWEST = 32


def parts_of(width: int, widest: int) -> tuple[tuple[int, int], ...]:
    """Starts and sizes of the powers of two, none above `widest`, that make up a head's `width`; the last may reach
    beyond it."""
    parts, start = [], 0
    while start < width:
        left = width - start
        size = NARROWEST if left <= NARROWEST else min(widest, 1 << (left.bit_length() - 1))
        parts.append((start, size))
        start += size
    whole = max(NARROWEST, next_power_of_two(width))
    return tuple(parts) if start < whole or whole > widest else ((0, whole),)


def columns(width: int, widest: int, before: int = 0):
    """Columns of each part of a head, and which of them lie in it as `[1, size]`, or None for all. The head's first
    column has so many `before` it."""
    for start, size in parts_of(width, widest):
        cols = before + start + jax.lax.iota(jnp.int32, size)
        yield cols, (cols < before + width)[None, :] if start + size > width else None


def both(mask, other):
    """The two masks together; `other` may be None for all."""
    return mask if other is None else mask & other


def overflow(kv_format: str, pool_codes: int) -> str:
    """Why a pool of so many codes cannot be addressed, or an empty string."""
    dtype = jnp.dtype(format_named(kv_format).dtype)
    sizes = beyond_signed_offsets(dtype)
    if pool_codes * dtype.itemsize not in sizes:
        return ""
    return (
        f"{pool_codes} codes of a byte lie between 2 and 4 GiB, where offsets overflow; hold no more than "
        f"{sizes.start - 1} or at least {sizes.stop} of them"
    )
