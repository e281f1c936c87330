# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (Kimi Team 2025): the gated delta rule with a decay for each channel of the keys."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.layers.delta_rule import DeltaHeads, delta_rule, delta_state
from metrale_jax.layers.linear import Linear, linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.recurrent import Recurrent, RecurrentSpec


@dataclass(frozen=True)
class KdaConfig:
    """Static facts of one layer; `norm_eps` is that of the norm over each head's output."""

    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float

    @property
    def heads(self) -> DeltaHeads:
        """The heads of the rule."""
        return DeltaHeads(
            self.num_heads, self.num_heads, self.head_dim, self.head_dim, self.conv_width, per_channel=True
        )


@struct.dataclass
class KdaParams:
    """`inputs [3 N H + 2 H + N, D]`: rows of queries, keys and values, then of two bottlenecks `[H]`, for decays and
    for the output's gate, and of strengths. `decays [N H, H]` and `gate [N H, H]` widen them again. `taps [W, 3 N H]`.
    float32: `rate [N]`, how fast each head decays, as a logarithm; `rate_bias [N H]`; `norm [H]`. `out [D, N H]`."""

    inputs: Linear
    decays: Linear
    gate: Linear
    taps: Any
    rate: Any
    rate_bias: Any
    norm: Any
    out: Linear


def kda_state(config: KdaConfig, formats: StateFormats) -> RecurrentSpec:
    """What the layer keeps of a sequence."""
    return delta_state(config.heads, formats)


def kda(
    x: Float[Array, "T D"],
    params: KdaParams,
    config: KdaConfig,
    tables: tuple,
    batch: TokenBatch,
    storage: Recurrent,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], Recurrent]:
    """The layer's output, and its group's storage after the step."""
    heads, width = config.heads, config.head_dim
    with jax.named_scope("inputs"):
        ends = [heads.channels, heads.channels + width, heads.channels + 2 * width]
        mixed, decays, gate, strengths = jnp.split(linear(x, params.inputs), ends, axis=-1)
        strengths = jax.nn.sigmoid(strengths.astype(jnp.float32))
        decays = linear(decays, params.decays).astype(jnp.float32) + params.rate_bias
        decays = jax.nn.softplus(decays).reshape(-1, config.num_heads, width)
        decays = -jnp.exp(params.rate)[:, None] * decays
        gate = jax.nn.sigmoid(linear(gate, params.gate).astype(jnp.float32))
    out, storage = delta_rule(mixed, params.taps, (decays, strengths), heads, batch, storage, layer, place.platform)
    with jax.named_scope("out"):
        out = rms_norm(out, params.norm, config.norm_eps) * gate.reshape(out.shape)
        return linear(out.reshape(len(x), -1).astype(x.dtype), params.out), storage
