# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward layer (Shazeer 2020)."""

from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from metrale_jax.core.config import MlpConfig
from metrale_jax.layers.linear import linear
from metrale_jax.layers.placement import Placement

ACTIVATIONS = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
    }
)


@struct.dataclass
class MlpParams:
    """`gate_up` holds the gate's rows above the up projection's, `[2F, D]`; `down` is `[D, F]`."""

    gate_up: Any
    down: Any


def mlp(x: Float[Array, "T D"], params: MlpParams, config: MlpConfig, place: Placement) -> Float[Array, "T D"]:
    """`down(activation(gate(x)) * up(x))`; the activation runs in float32.

    With `place.axis`, each of its devices has some of the `F` channels.
    """
    gate, up = jnp.split(linear(x, params.gate_up), 2, axis=-1)
    hidden = ACTIVATIONS[config.activation](gate.astype(jnp.float32)).astype(x.dtype) * up
    return linear(hidden, params.down, place.axis)
