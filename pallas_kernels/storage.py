# SPDX-License-Identifier: Apache-2.0
"""How arrays lie in a platform's memory: what they take of it, and which sizes its kernels cannot address."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax.numpy as jnp

from pallas_kernels.shapes import ceil_div, next_power_of_two, round_up

LANES, SUBLANES = 128, 8
NONE = range(0)


@dataclass(frozen=True)
class Storage:
    """`num_bytes(shape, dtype)` is what an array takes, and `unaddressed(dtype)` the sizes in bytes, as data count
    them, at which kernels decline it."""

    num_bytes: Callable[[tuple[int, ...], str], int]
    unaddressed: Callable[[str], range]


def packed_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array whose numbers lie one after another."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def padded_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array as a TPU lays it out: in tiles of 128 lanes by 8 rows, or by the power of two that holds fewer,
    which are no fewer than share a word of 32 bits."""
    itemsize = jnp.dtype(dtype).itemsize
    *outer, rows, width = (1, *shape) if len(shape) == 1 else shape
    rows = round_up(rows, SUBLANES) if rows > SUBLANES else max(4 // itemsize, next_power_of_two(rows))
    return math.prod(outer) * rows * round_up(width, LANES) * itemsize


def beyond_signed_offsets(dtype) -> range:
    """The sizes of arrays that Triton's kernels cannot address. JAX gives it offsets of 32 bits, which count elements
    and have a sign, up to 4 GiB, and of 64 bits from there."""
    return range((1 << 31) + 1, (1 << 32) + 1) if jnp.dtype(dtype).itemsize == 1 else NONE


def all_addressed(dtype) -> range:
    """No size."""
    return NONE


STORAGE: Mapping[str, Storage] = MappingProxyType(
    {
        "cpu": Storage(packed_bytes, all_addressed),
        "cuda": Storage(packed_bytes, beyond_signed_offsets),
        "tpu": Storage(padded_bytes, all_addressed),
    }
)

# Bytes of one unit of an array, and the sizes at which the array is declined.
Gap = tuple[int, range]


def served_count(wanted: int, most: int, gaps: Sequence[Gap]) -> int:
    """The least count of units, `wanted` or more, at which no array is declined; if that is above `most`, the greatest
    that is less."""
    up = _moved(wanted, gaps, lambda unit, sizes: ceil_div(sizes.stop, unit))
    return up if up <= most else _moved(min(wanted, most), gaps, lambda unit, sizes: (sizes.start - 1) // unit)


def _moved(count: int, gaps: Sequence[Gap], out_of: Callable[[int, range], int]) -> int:
    while declining := [gap for gap in gaps if count * gap[0] in gap[1]]:
        count = out_of(*declining[0])
    return count
