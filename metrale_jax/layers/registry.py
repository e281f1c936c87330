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
from metrale_jax.layers.mlp import mlp


@dataclass(frozen=True)
class Mixer:
    """A row of `MIXERS`; `name` is what users read."""

    name: str
    run: Callable
    state: Callable


@dataclass(frozen=True)
class FeedForward:
    """A row of `FEED_FORWARDS`."""

    name: str
    run: Callable


MIXERS: Mapping[type, Mixer] = MappingProxyType({AttentionConfig: Mixer("attention", attention, attention_state)})
FEED_FORWARDS: Mapping[type, FeedForward] = MappingProxyType({MlpConfig: FeedForward("feed-forward", mlp)})


def kind_names(layer: LayerConfig) -> list[str]:
    """What the layer is made of."""
    last = () if layer.mlp is None else (FEED_FORWARDS[type(layer.mlp)].name,)
    return [*(MIXERS[type(mixer)].name for mixer in layer.mixers), *last]
