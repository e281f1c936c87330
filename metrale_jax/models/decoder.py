# SPDX-License-Identifier: Apache-2.0
"""The decoder that dense families share: parameters, state specs and one forward pass.

A block is `x + r * post(attention(pre(x)))`, then the same with the feed-forward layer. A family chooses which of
the four norms exist by giving them weights; an absent one is `()`. Layers are unrolled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.attention import Placement, attention
from metrale_jax.layers.mlp import mlp
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.parallel import AXIS, WHOLE, gathered, over_devices
from metrale_jax.layers.rope import rope_tables
from metrale_jax.models.outline import first_index, outlined
from metrale_jax.sharding.rules import tensor_size
from metrale_jax.state.paged import PagedKv, PagedKvSpec
from metrale_jax.state.pool import Pool, PoolLayout, make_layout, pool_specs


@struct.dataclass
class LayerParams:
    """One block: `attention`, `mlp` and up to four norm weights `[D]`."""

    attention: Any
    mlp: Any
    attention_norm: Any = ()
    attention_post_norm: Any = ()
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


def layer_states(config: ModelConfig, kv_format: str) -> tuple[PagedKvSpec, ...]:
    """The state that each layer keeps."""
    return tuple(
        PagedKvSpec(a.num_kv_heads, a.head_dim, a.head_dim, a.window, kv_format)
        for a in (layer.attention for layer in config.layers)
    )


def make_model(
    config: ModelConfig,
    platform: str,
    block_size: int,
    kv_format: str,
    attention: str = "auto",
    sharing: Sharing | None = None,
) -> Model:
    """The model's static half for one platform and block size."""
    return Model(config, make_layout(layer_states(config, kv_format), block_size), platform, attention, sharing)


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
    ropes = {layer.attention.rope for layer in config.layers}
    tables = {rope: rope_tables(rope, batch.positions, batch.rope_lens) for rope in ropes}
    groups = list(pool.groups)
    indices = [first_index(model.platform, batch.positions)] * len(groups)
    for number, (layer, weights) in enumerate(zip(config.layers, params.layers, strict=True)):
        group, _ = model.layout.placement[number]
        place = Placement(group, config.norm_eps, model.platform, model.attention, *_axes(model.sharing, number))
        block = Block(layer, place, config.residual_scale)
        rope = tables[layer.attention.rope]
        x, groups[group], indices[group] = outlined(block, model.platform)(
            x, weights, rope, batch, groups[group], indices[group]
        )
    return rms_norm(x, params.final_norm, config.norm_eps), Pool(tuple(groups))


def _axes(sharing: Sharing | None, layer: int) -> tuple[str, str]:
    """The axis that shares a layer's heads, and the same if one norm is over all of them."""
    if sharing is None:
        return "", ""
    return AXIS, AXIS if sharing.params.layers[layer].attention.q_norm == PartitionSpec(AXIS) else ""


def _on_one_device(model: Model) -> Model:
    """The model as each device sees it: with its share of the heads."""
    size = tensor_size(model.mesh)

    def local(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        heads, kv_heads = attention.num_heads // size, attention.num_kv_heads // size
        return replace(layer, attention=replace(attention, num_heads=heads, num_kv_heads=kv_heads))

    return replace(model, config=replace(model.config, layers=tuple(map(local, model.config.layers))))


@dataclass(frozen=True)
class Block:
    """One decoder layer as a function of its static facts; equal blocks are one function."""

    layer: LayerConfig
    place: Placement
    residual: float

    def __call__(self, x, weights: LayerParams, rope: tuple, batch: TokenBatch, kv: PagedKv, index):
        """The layer's output rows `[T, D]`, its group's storage with layer `index` appended to, and the next index."""
        eps, layer = self.place.norm_eps, self.layer
        with jax.named_scope("attention"):
            hidden = rms_norm(x, weights.attention_norm, eps)
            hidden, kv = attention(hidden, weights.attention, layer.attention, rope, batch, kv, index, self.place)
            x = x + _scaled(rms_norm(hidden, weights.attention_post_norm, eps), self.residual)
        with jax.named_scope("mlp"):
            hidden = mlp(rms_norm(x, weights.mlp_norm, eps), weights.mlp, layer.mlp.activation, self.place.axis)
            x = x + _scaled(rms_norm(hidden, weights.mlp_post_norm, eps), self.residual)
        return x, kv, index + 1


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
