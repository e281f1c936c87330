# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer, gated (Shazeer 2020) or not."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from metrale_jax.core.config import MlpConfig
from metrale_jax.layers.linear import linear
from metrale_jax.layers.placement import Placement
from pallas_kernels.activations import ACTIVATIONS


@struct.dataclass
class MlpParams:
    """`gate_up` holds the gate's rows above the up projection's, `[2F, D]`, or of a layer without a gate the latter
    alone; `down` is `[D, F]`."""

    gate_up: Any
    down: Any


def mlp(x: Float[Array, "T D"], params: MlpParams, config: MlpConfig, place: Placement) -> Float[Array, "T D"]:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`; the activation runs in float32.

    With `place.axis`, each of its devices has some of the `F` channels.
    """
    first, *up = jnp.split(linear(x, params.gate_up), 2 if config.gated else 1, axis=-1)
    hidden = ACTIVATIONS[config.activation](first.astype(jnp.float32)).astype(x.dtype)
    return linear(hidden * up[0] if config.gated else hidden, params.down, place.axis)
