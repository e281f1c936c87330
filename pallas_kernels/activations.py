# SPDX-License-Identifier: Apache-2.0
"""Activation functions by the names that configs use, and the one that closes an expert's first matmul."""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    }
)


@dataclass(frozen=True)
class Activation:
    """Static facts of a feed-forward layer's activation; `name` is a key of `ACTIVATIONS`.

    A `gated` one multiplies `act(gate)` by `up + shift`. A `limit` above 0 bounds the gate from above and up on both
    sides, before anything else. `slope` s makes the activation `act(s x) / s`.
    """

    name: str
    gated: bool = True
    limit: float = 0.0
    slope: float = 1.0
    shift: float = 0.0


def activated(gate: Float[Array, "..."], up: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """The activation of float32 `gate` times `up`, which is not looked at where the activation is not gated."""
    act, limit, slope = ACTIVATIONS[activation.name], activation.limit, activation.slope
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    hidden = act(gate) if slope == 1.0 else act(gate * slope) / slope
    if not activation.gated:
        return hidden
    return hidden * (up + activation.shift if activation.shift else up)
