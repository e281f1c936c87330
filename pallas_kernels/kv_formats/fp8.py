# SPDX-License-Identifier: Apache-2.0
"""Eight-bit floats (Micikevicius et al. 2022) under a scale for each row."""

import jax.numpy as jnp

from pallas_kernels.kv_formats.format import KvFormat


def encode(rows, dtype: str):
    """The rows clipped to what the format can hold, then rounded: a value above its largest would become NaN."""
    limit = float(jnp.finfo(jnp.dtype(dtype)).max)
    return jnp.clip(rows, -limit, limit).astype(jnp.dtype(dtype))


def decode(codes, dtype):
    """The numbers in `dtype`, exact in any wider format."""
    return codes.astype(dtype)


E4M3 = KvFormat("float8_e4m3fn", 448.0, encode, decode)
E5M2 = KvFormat("float8_e5m2", 57344.0, encode, decode)
