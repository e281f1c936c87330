# SPDX-License-Identifier: Apache-2.0
"""The decoder that dense families share: parameters, state specs and one forward pass.

A block is `x + r * post(attention(pre(x)))`, then the same with the feed-forward layer. A family chooses which of
the four norms exist by giving them weights; an absent one is `()`. Layers are unrolled.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.attention import Placement, attention
from metrale_jax.layers.mlp import mlp
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.rope import rope_tables
from metrale_jax.models.outline import first_index, outlined
from metrale_jax.state.paged import PagedKv, PagedKvSpec
from metrale_jax.state.pool import Pool, PoolLayout, make_layout


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
class Model:
    """The static half of a model: config, pool layout, the platform that its steps are lowered for, and which
    implementation of paged attention they take there."""

    config: ModelConfig
    layout: PoolLayout
    platform: str
    attention: str = "auto"


def layer_states(config: ModelConfig, kv_format: str) -> tuple[PagedKvSpec, ...]:
    """The state that each layer keeps."""
    return tuple(
        PagedKvSpec(a.num_kv_heads, a.head_dim, a.head_dim, a.window, kv_format)
        for a in (layer.attention for layer in config.layers)
    )


def make_model(config: ModelConfig, platform: str, block_size: int, kv_format: str, attention: str = "auto") -> Model:
    """The model's static half for one platform and block size."""
    return Model(config, make_layout(layer_states(config, kv_format), block_size), platform, attention)


def forward(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    """Final hidden rows of every token of `batch`, and the pool with their keys and values in it."""
    config = model.config
    with jax.named_scope("embed"):
        x = embedding.embed(batch.tokens, params.embed, config.embed_scale)
    ropes = {layer.attention.rope for layer in config.layers}
    tables = {rope: rope_tables(rope, batch.positions, batch.rope_lens) for rope in ropes}
    groups = list(pool.groups)
    indices = [first_index(model.platform, batch.positions)] * len(groups)
    for number, (layer, weights) in enumerate(zip(config.layers, params.layers, strict=True)):
        group, _ = model.layout.placement[number]
        block = Block(layer, Placement(group, config.norm_eps, model.platform, model.attention), config.residual_scale)
        rope = tables[layer.attention.rope]
        x, groups[group], indices[group] = outlined(block, model.platform)(
            x, weights, rope, batch, groups[group], indices[group]
        )
    return rms_norm(x, params.final_norm, config.norm_eps), Pool(tuple(groups))


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
            hidden = mlp(rms_norm(x, weights.mlp_norm, eps), weights.mlp, layer.mlp.activation)
            x = x + _scaled(rms_norm(hidden, weights.mlp_post_norm, eps), self.residual)
        return x, kv, index + 1


def _scaled(x, scale: float):
    return x if scale == 1.0 else x * scale


def head_logits(
    model: Model, params: DecoderParams, hidden: Float[Array, "T D"], rows: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """Float32 logits of the picked rows of `hidden`."""
    config = model.config
    head = params.embed if isinstance(params.head, tuple) else params.head
    with jax.named_scope("head"):
        picked = hidden.at[rows].get(mode="clip")
        return embedding.logits(picked, head, config.logit_scale, config.logit_softcap)
