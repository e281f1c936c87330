# SPDX-License-Identifier: Apache-2.0
"""Keys and values as floating-point numbers, nothing added."""

import jax.numpy as jnp

from pallas_kernels.kv_formats.format import KvFormat


def encode(rows, dtype: str):
    """The rows rounded to `dtype`."""
    return rows.astype(jnp.dtype(dtype))


def decode(codes, dtype):
    """The numbers in `dtype`."""
    return codes.astype(dtype)


FLOAT32 = KvFormat("float32", 0.0, encode, decode)
BFLOAT16 = KvFormat("bfloat16", 0.0, encode, decode)
FLOAT16 = KvFormat("float16", 0.0, encode, decode)
