# SPDX-License-Identifier: Apache-2.0
"""Eight-bit integers, symmetric, under a scale for each row."""

import jax.numpy as jnp

from pallas_kernels.kv_formats.format import KvFormat

LARGEST = 127.0


def encode(rows, dtype: str):
    """The rows rounded to the nearest integer, ties to even."""
    return jnp.clip(jnp.round(rows), -LARGEST, LARGEST).astype(jnp.dtype(dtype))


def decode(codes, dtype):
    """The integers in `dtype`, exact in bfloat16 too."""
    return codes.astype(dtype)


INT8 = KvFormat("int8", LARGEST, encode, decode)
