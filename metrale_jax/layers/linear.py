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

from metrale_jax.layers.parallel import summed
from pallas_kernels.dispatch import by_platform

# Rows up to which XLA's CPU kernels are quicker with the weight as their left operand.
FEW_ROWS = 256


@struct.dataclass
class Linear:
    """`weight [out, in]` and `bias [out]`, or `()` where the layer has none."""

    weight: Any
    bias: Any = ()


def linear(x: Float[Array, "T D"], w: Linear, axis: str = "") -> Float[Array, "T F"]:
    """`x @ weight.T + bias`, accumulated in float32, in x's dtype.

    With `axis`, each of its devices has some of x's columns and of the weight's, and the products are summed over it.
    """
    if not axis:
        return project(x, w).astype(x.dtype)
    out = summed(project(x, Linear(w.weight)).astype(x.dtype), axis)
    return out if isinstance(w.bias, tuple) else out + w.bias.astype(x.dtype)


def project(x: Float[Array, "T D"], w: Linear) -> Float[Array, "T F"]:
    """`linear` before its cast: the float32 sums."""
    out = by_platform(_product, cpu=_cpu_product)(x, w.weight)
    return out if isinstance(w.bias, tuple) else out + w.bias.astype(jnp.float32)


def _product(x, weight):
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _cpu_product(x, weight):
    if not 1 < x.shape[0] <= FEW_ROWS:
        return _product(x, weight)
    # The barrier keeps XLA from turning the operands round again.
    turned = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(turned).T
