# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Yang et al. 2024): a state matrix a head, decayed and corrected by every token."""

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
class GatedDeltaConfig:
    """Static facts of one layer. `norm_eps` is that of the norm over each head's output; strengths are a sigmoid times
    `most_strength`: above one a token can turn what a key holds into its opposite."""

    heads: DeltaHeads
    norm_eps: float
    most_strength: float = 1.0


@struct.dataclass
class GatedDeltaParams:
    """`inputs [C + V Hv + 2 V, D]`: rows of queries, keys and values, then of the output's gate, of strengths and of
    decays. `taps [W, C]`. float32: `rate [V]`, how fast each head decays, as a logarithm; `rate_bias [V]`; `norm [Hv]`.
    `out [D, V Hv]`."""

    inputs: Linear
    taps: Any
    rate: Any
    rate_bias: Any
    norm: Any
    out: Linear


def gated_delta_state(config: GatedDeltaConfig, formats: StateFormats) -> RecurrentSpec:
    """What the layer keeps of a sequence."""
    return delta_state(config.heads, formats)


def gated_delta(
    x: Float[Array, "T D"],
    params: GatedDeltaParams,
    config: GatedDeltaConfig,
    tables: tuple,
    batch: TokenBatch,
    storage: Recurrent,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], Recurrent]:
    """The layer's output, and its group's storage after the step."""
    heads = config.heads
    columns = heads.heads * heads.value_dim
    with jax.named_scope("inputs"):
        ends = [heads.channels, heads.channels + columns, heads.channels + columns + heads.heads]
        mixed, gate, strengths, decays = jnp.split(linear(x, params.inputs), ends, axis=-1)
        strengths = config.most_strength * jax.nn.sigmoid(strengths.astype(jnp.float32))
        decays = jax.nn.softplus(decays.astype(jnp.float32) + params.rate_bias)
        decays = -jnp.exp(params.rate) * decays
    out, storage = delta_rule(mixed, params.taps, (decays, strengths), heads, batch, storage, layer, place.platform)
    with jax.named_scope("out"):
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
        out = rms_norm(out, params.norm, config.norm_eps) * gate
        return linear(out.reshape(-1, columns).astype(x.dtype), params.out), storage
