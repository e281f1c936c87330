# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], weight: Any, eps: float, axis: str = "") -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x^2) + eps) * weight` in float32, in x's dtype. A weight of `()` is an absent norm: x itself.

    With `axis`, each of its devices has as many of the columns, and the mean is over all of them.
    """
    if isinstance(weight, tuple):
        return x
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    mean = jax.lax.pmean(mean, axis) if axis else mean
    scale = jax.lax.rsqrt(mean + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
