# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers by the type of their configs: one line each.

A mixer reads a sequence's past: `run(x [T, D], params, config, tables, batch, storage, layer, place)` gives its output
`[T, D]` and its group's storage, brought up to date at index `layer`; `state(config, formats)` is the spec of what it
keeps. A feed-forward layer looks at each token alone: `run(x, params, config, place)` gives `[T, D]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig
from metrale_jax.layers.attention import attention, attention_state
from metrale_jax.layers.gated_delta import GatedDeltaConfig, gated_delta, gated_delta_state
from metrale_jax.layers.kda import KdaConfig, kda, kda_state
from metrale_jax.layers.mamba2 import Mamba2Config, mamba2, mamba2_state
from metrale_jax.layers.mla import MlaConfig, mla, mla_state
from metrale_jax.layers.mlp import mlp
from metrale_jax.layers.moe import MoeConfig, chosen_weights, moe


@dataclass(frozen=True)
class Mixer:
    """A row of `MIXERS`; `name` is what users read."""

    name: str
    run: Callable
    state: Callable


@dataclass(frozen=True)
class FeedForward:
    """A row of `FEED_FORWARDS`. `chosen(params, config)` are the weights of which a token uses a share, and the share;
    None where a token uses all of them."""

    name: str
    run: Callable
    chosen: Callable | None = None


MIXERS: Mapping[type, Mixer] = MappingProxyType(
    {
        AttentionConfig: Mixer("attention", attention, attention_state),
        Mamba2Config: Mixer("Mamba-2", mamba2, mamba2_state),
        GatedDeltaConfig: Mixer("gated DeltaNet", gated_delta, gated_delta_state),
        MlaConfig: Mixer("latent attention", mla, mla_state),
        KdaConfig: Mixer("Kimi delta attention", kda, kda_state),
    }
)
FEED_FORWARDS: Mapping[type, FeedForward] = MappingProxyType(
    {
        MlpConfig: FeedForward("feed-forward", mlp),
        MoeConfig: FeedForward("mixture of experts", moe, chosen_weights),
    }
)


def kind_names(layer: LayerConfig) -> list[str]:
    """What the layer is made of."""
    last = () if layer.mlp is None else (FEED_FORWARDS[type(layer.mlp)].name,)
    return [*(MIXERS[type(mixer)].name for mixer in layer.mixers), *last]
