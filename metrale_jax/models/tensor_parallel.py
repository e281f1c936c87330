# SPDX-License-Identifier: Apache-2.0
"""`shared`: a model's description for several devices, each with its share of the heads, channels and vocabulary."""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.registry import kind_names
from metrale_jax.models.decoder import Sharing
from metrale_jax.models.family import Description
from metrale_jax.sharding.fused import by_shard
from metrale_jax.sharding.rules import partition_spec, tensor_size


def shared(description: Description, mesh: Mesh | None) -> tuple[Description, Sharing | None]:
    """The description as the devices of `mesh` hold it, and how they share it; unchanged, and None, for one device.

    Key and value heads that are fewer than the devices are held by several each. Raises `ConfigError` where heads or
    channels cannot be shared out evenly.
    """
    size = tensor_size(mesh)
    if size == 1:
        return description, None
    config = description.config
    layers = {layer: shared_layer(layer, size) for layer in dict.fromkeys(config.layers)}
    specs = jax.tree.map(lambda spec: by_shard(spec, size), description.specs)
    config = replace(config, layers=tuple(layers[layer] for layer in config.layers))
    placed = jax.tree.map(lambda spec: partition_spec(spec.axes, spec.shape, mesh), specs)
    return Description(config, specs), Sharing(mesh, placed)


def fitting_size(description: Description, most: int) -> int:
    """How many devices, up to `most`, can share the model."""
    layers = set(description.config.layers)
    return max(size for size in range(1, most + 1) if all(size in _sizes(layer) for layer in layers))


def shared_layer(layer: LayerConfig, size: int) -> LayerConfig:
    """The layer as `size` devices hold it together. Raises `ConfigError` where they cannot."""
    attention = _attention(layer)
    for count, name in ((attention.num_heads, "query heads"), (layer.mlp.hidden_dim, "feed-forward channels")):
        if count % size:
            raise ConfigError(f"{count} {name} cannot be shared out among {size} devices; use {_listed(layer)}.")
    kv_heads = attention.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"{kv_heads} key and value heads can neither be shared out among {size} devices nor be held by as many "
            f"devices each; use {_listed(layer)}."
        )
    return replace(layer, mixers=(replace(attention, num_kv_heads=max(kv_heads, size)),))


def _attention(layer: LayerConfig) -> AttentionConfig:
    if not _can_share(layer):
        raise ConfigError(
            f"layers of {' and '.join(kind_names(layer))} cannot be shared out among devices; use one device."
        )
    return layer.mixers[0]


def _can_share(layer: LayerConfig) -> bool:
    return [type(one) for one in (*layer.mixers, layer.mlp)] == [AttentionConfig, MlpConfig]


def _sizes(layer: LayerConfig) -> list[int]:
    if not _can_share(layer):
        return [1]
    attention = layer.mixers[0]
    heads, kv_heads, channels = attention.num_heads, attention.num_kv_heads, layer.mlp.hidden_dim
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and channels % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _listed(layer: LayerConfig) -> str:
    *some, last = map(str, _sizes(layer))
    return f"{', '.join(some)} or {last}" if some else last
