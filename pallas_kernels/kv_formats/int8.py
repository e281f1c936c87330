# SPDX-License-Identifier: Apache-2.0
"""Eight-bit integers, symmetric, under a scale for each row."""

import jax.numpy as jnp

from pallas_kernels.kv_formats.format import KvFormat

LARGEST = 127.0


def encode(rows, dtype: str):
    """The rows rounded to the nearest integer, ties to even."""
    return jnp.clip(rounded(rows), -LARGEST, LARGEST).astype(jnp.dtype(dtype))


def rounded(numbers):
    """The nearest whole numbers, ties to even, of operations that every kernel language has."""
    below = jnp.floor(numbers)
    over, odd = numbers - below, below - 2 * jnp.floor(below * 0.5)
    return below + jnp.where((over > 0.5) | ((over == 0.5) & (odd > 0)), 1.0, 0.0)


def decode(codes, dtype):
    """The integers in `dtype`, exact in bfloat16 too."""
    return codes.astype(dtype)


INT8 = KvFormat("int8", LARGEST, encode, decode)
