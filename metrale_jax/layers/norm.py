# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], weight: Any, eps: float) -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x^2) + eps) * weight` in float32, in x's dtype. A weight of `()` is an absent norm: x itself."""
    if isinstance(weight, tuple):
        return x
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
