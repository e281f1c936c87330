# SPDX-License-Identifier: Apache-2.0
"""The decoder that families share: parameters, state specs and one forward pass.

A block is `x + r * post(mixers(pre(x)))`, then the same with the feed-forward layer; either may be missing. A family
chooses which of the four norms exist by giving them weights; an absent one is `()`. Layers are unrolled.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.parallel import AXIS, WHOLE, gathered, over_devices
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.registry import FEED_FORWARDS, MIXERS
from metrale_jax.layers.rope import rope_tables
from metrale_jax.models.outline import first_index, outlined
from metrale_jax.sharding.rules import tensor_size
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import Pool, PoolLayout, make_layout, pool_specs
from metrale_jax.state.positions import advanced, located, misplaced


@struct.dataclass
class LayerParams:
    """One block: params of each of its `mixers`, of its `mlp` (`()` for none), and up to four norm weights `[D]`."""

    mixers: tuple
    mlp: Any = ()
    mixer_norm: Any = ()
    mixer_post_norm: Any = ()
    mlp_norm: Any = ()
    mlp_post_norm: Any = ()


@struct.dataclass
class DecoderParams:
    """`embed [V, D]`, `layers`, `final_norm [D]` and `head [V, D]`, which is `()` where the embedding serves."""

    embed: Any
    layers: tuple
    final_norm: Any
    head: Any = ()


@dataclass(frozen=True)
class Sharing:
    """How several devices share a model: their mesh, and the `PartitionSpec` of each of its `params`."""

    mesh: Mesh
    params: DecoderParams


@dataclass(frozen=True)
class Model:
    """The static half of a model: config, pool layout, the platform that its steps are lowered for, which
    implementation of paged attention they take there, and how devices share it (None for one device: see
    `models.tensor_parallel`)."""

    config: ModelConfig
    layout: PoolLayout
    platform: str
    attention: str = "auto"
    sharing: Sharing | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model, None for one alone."""
        return None if self.sharing is None else self.sharing.mesh


def layer_states(config: ModelConfig, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
    """The states that each layer keeps, one for each of its mixers."""
    return tuple(tuple(MIXERS[type(m)].state(m, formats) for m in layer.mixers) for layer in config.layers)


def make_model(
    config: ModelConfig,
    platform: str,
    block_size: int,
    formats: StateFormats,
    attention: str = "auto",
    sharing: Sharing | None = None,
) -> Model:
    """The model's static half for one platform and block size."""
    num_shards = 1 if sharing is None else tensor_size(sharing.mesh)
    layout = make_layout(layer_states(config, formats), block_size, platform, num_shards)
    return Model(config, layout, platform, attention, sharing)


def forward(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    """Final hidden rows of every token of `batch`, and the pool with their keys and values in it."""
    if model.sharing is None:
        return _forward(model, params, pool, batch)
    pools = pool_specs(pool, model.mesh)
    local = partial(_forward, _on_one_device(model))
    return over_devices(local, model.mesh, (model.sharing.params, pools, WHOLE), (WHOLE, pools))(params, pool, batch)


def _forward(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    config = model.config
    with jax.named_scope("embed"):
        axis = AXIS if params.embed.shape[0] < config.vocab_size else ""
        x = embedding.embed(batch.tokens, params.embed, config.embed_scale, axis)
    tables = {rope: rope_tables(rope, batch.positions, batch.rope_lens) for rope in config.ropes}
    if pool.slot_groups:
        batch = located(batch, pool.positions, model.layout.num_pending)
    groups = [*pool.groups, *pool.slot_groups]
    indices = [first_index(model.platform, batch.positions)] * len(groups)
    for number, (layer, weights) in enumerate(zip(config.layers, params.layers, strict=True)):
        used = [group for group, _ in model.layout.placement[number]]
        shared = _axes(model.sharing, number)
        places = tuple(
            Placement(group, config.norm_eps, model.platform, model.attention, *shared) for group in used or [0]
        )
        block = Block(layer, places, config.residual_scale)
        ropes = tuple(tables.get(getattr(mixer, "rope", None), ()) for mixer in layer.mixers)
        storages = tuple((groups[group], indices[group]) for group in used)
        x, storages = outlined(block, model.platform)(x, weights, ropes, batch, storages)
        for group, storage in zip(used, storages, strict=True):
            groups[group], indices[group] = storage
    return _finished(model, params, pool, groups, batch, x)


def _finished(model: Model, params: DecoderParams, pool: Pool, groups: list, batch: TokenBatch, x):
    count = len(pool.groups)
    with jax.named_scope("final_norm"):
        x = rms_norm(x, params.final_norm, model.config.norm_eps)
    if not pool.slot_groups:
        return x, Pool(tuple(groups))
    x = jnp.where(misplaced(batch, model.layout.num_pending)[:, None], jnp.nan, x)
    return x, Pool(tuple(groups[:count]), tuple(groups[count:]), advanced(pool.positions, batch))


def _axes(sharing: Sharing | None, layer: int) -> tuple[str, str]:
    """The axis that shares a layer's heads, and the same if one norm is over all of them."""
    if sharing is None:
        return "", ""
    (weights,) = sharing.params.layers[layer].mixers
    return AXIS, AXIS if weights.q_norm == PartitionSpec(AXIS) else ""


def _on_one_device(model: Model) -> Model:
    """The model as each device sees it: with its share of the heads."""
    size = tensor_size(model.mesh)

    def local(layer: LayerConfig) -> LayerConfig:
        (attention,) = layer.mixers
        heads, kv_heads = attention.num_heads // size, attention.num_kv_heads // size
        return replace(layer, mixers=(replace(attention, num_heads=heads, num_kv_heads=kv_heads),))

    return replace(model, config=replace(model.config, layers=tuple(map(local, model.config.layers))))


@dataclass(frozen=True)
class Block:
    """One decoder layer as a function of its static facts; equal blocks are one function."""

    layer: LayerConfig
    places: tuple[Placement, ...]
    residual: float

    def __call__(self, x, weights: LayerParams, ropes: tuple, batch: TokenBatch, storages: tuple):
        """The layer's output rows `[T, D]`, and its states brought up to date.

        `storages` has for each mixer its group's storage and the layer's index there; it comes back with the indices
        of the next layers. `ropes` are each mixer's rotary tables.
        """
        eps, layer = self.places[0].norm_eps, self.layer
        after = []
        if layer.mixers:
            with jax.named_scope("mixer"):
                hidden = rms_norm(x, weights.mixer_norm, eps)
                outputs = []
                each = zip(layer.mixers, weights.mixers, ropes, storages, self.places, strict=True)
                for config, params, tables, (storage, index), place in each:
                    run = MIXERS[type(config)].run
                    out, storage = run(hidden, params, config, tables, batch, storage, index, place)
                    outputs.append(out)
                    after.append((storage, index + 1))
                x = x + _scaled(rms_norm(sum(outputs[1:], outputs[0]), weights.mixer_post_norm, eps), self.residual)
        if layer.mlp is not None:
            with jax.named_scope("mlp"):
                run = FEED_FORWARDS[type(layer.mlp)].run
                hidden = run(rms_norm(x, weights.mlp_norm, eps), weights.mlp, layer.mlp, self.places[0])
                x = x + _scaled(rms_norm(hidden, weights.mlp_post_norm, eps), self.residual)
        return x, tuple(after)


def _scaled(x, scale: float):
    return x if scale == 1.0 else x * scale


def _gathered(logits: Callable, axis: str, hidden, head):
    return gathered(logits(hidden, head), axis)


def head_logits(
    model: Model, params: DecoderParams, hidden: Float[Array, "T D"], rows: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """Float32 logits of the picked rows of `hidden`, all of them on every device of a model that is shared: one gather
    costs less than the many small sums that drawing over a divided vocabulary would take."""
    config = model.config
    head, which = (params.embed, "embed") if isinstance(params.head, tuple) else (params.head, "head")
    logits = partial(embedding.logits, scale=config.logit_scale, softcap=config.logit_softcap)
    if model.sharing is not None:
        spec = getattr(model.sharing.params, which)
        logits = over_devices(partial(_gathered, logits, spec[0] or ""), model.mesh, (WHOLE, spec), WHOLE)
    with jax.named_scope("head"):
        return logits(hidden.at[rows].get(mode="clip"), head)
