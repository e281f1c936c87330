# SPDX-License-Identifier: Apache-2.0
"""`linear`, the only matmul entry. Weights lie as checkpoints store them, `[out, in]`.

That layout needs no transpose at loading, serves a tied embedding as it is, and is the one that XLA's CPU kernels
read fastest for wide outputs; GPU and TPU compilers take either.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float


@struct.dataclass
class Linear:
    """`weight [out, in]` and `bias [out]`, or `()` where the layer has none."""

    weight: Any
    bias: Any = ()


def linear(x: Float[Array, "T D"], w: Linear) -> Float[Array, "T F"]:
    """`x @ weight.T + bias`, accumulated in float32, in x's dtype."""
    return project(x, w).astype(x.dtype)


def project(x: Float[Array, "T D"], w: Linear) -> Float[Array, "T F"]:
    """`linear` before its cast: the float32 sums."""
    out = jax.lax.dot_general(x, w.weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out if isinstance(w.bias, tuple) else out + w.bias.astype(jnp.float32)
