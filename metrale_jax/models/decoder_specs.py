# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of the shared decoder under the names that Hugging Face checkpoints use."""

from dataclasses import dataclass

import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, ModelConfig
from metrale_jax.core.specs import ParamSpec, Part, Source, Transform, identity, stacked_rows
from metrale_jax.layers.attention import AttentionLayerParams
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.models.decoder import DecoderParams, LayerParams
from metrale_jax.sharding import axes


def one_plus(array: np.ndarray) -> np.ndarray:
    """`1 + w` in float32: norms whose checkpoint stores the distance from one."""
    return array.astype(np.float32) + np.float32(1)


@dataclass(frozen=True)
class DecoderNames:
    """What a family's layers contain. An empty norm name means that the norm does not exist.

    `qkv` and `gate_up` list the projections that are stacked, in order; one name means that the file stores them
    stacked. `qk_norm` is "none", "head" for a norm over each head or "full" for one over all heads.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qk_norm: str = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_transform: Transform = identity


def decoder_specs(config: ModelConfig, names: DecoderNames) -> DecoderParams:
    """A tree of `ParamSpec` shaped like the decoder's params."""
    vocab, width = config.vocab_size, config.hidden_dim
    table_axes = (axes.VOCAB, axes.HIDDEN)
    head = ParamSpec((vocab, width), table_axes, (Source("lm_head.weight", (vocab, width)),))
    return DecoderParams(
        embed=ParamSpec((vocab, width), table_axes, (Source("model.embed_tokens.weight", (vocab, width)),)),
        layers=tuple(_layer(config, layer, names, f"model.layers.{i}.") for i, layer in enumerate(config.layers)),
        final_norm=_norm("model.norm.weight", width, names),
        head=() if config.tie_embeddings else head,
    )


def _layer(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
    def norm(name):
        return _norm(f"{prefix}{name}.weight", config.hidden_dim, names) if name else ()

    return LayerParams(
        attention=_attention(config.hidden_dim, layer.attention, names, prefix),
        mlp=_mlp(config.hidden_dim, layer.mlp.hidden_dim, names, prefix),
        attention_norm=norm(names.attention_norm),
        attention_post_norm=norm(names.attention_post_norm),
        mlp_norm=norm(names.mlp_norm),
        mlp_post_norm=norm(names.mlp_post_norm),
    )


def _norm(name: str, width: int, names: DecoderNames) -> ParamSpec:
    return ParamSpec((width,), (axes.HIDDEN,), (Source(name, (width,)),), names.norm_transform, keep_float32=True)


def _attention(width: int, layer: AttentionConfig, names: DecoderNames, prefix: str) -> AttentionLayerParams:
    query, kv = Part(layer.num_heads, layer.head_dim), Part(layer.num_kv_heads, layer.head_dim)
    qkv = _fused(prefix, names.qkv, (query, kv, kv), width, names.qkv_bias, (axes.QKV, axes.HIDDEN))
    columns = query.units * query.width
    out = _linear(prefix, "self_attn.o_proj", width, columns, names.out_bias, (axes.HIDDEN, axes.HEADS))
    if names.qk_norm == "none":
        return AttentionLayerParams(qkv, out)
    over_heads = names.qk_norm == "full"
    q_norm, k_norm = (
        ParamSpec(
            (size := part.units * part.width if over_heads else part.width,),
            (axis if over_heads else axes.HEAD_DIM,),
            (Source(f"{prefix}self_attn.{name}.weight", (size,)),),
            names.norm_transform,
            keep_float32=True,
            parts=(part,) if over_heads else (),
        )
        for name, part, axis in (("q_norm", query, axes.HEADS), ("k_norm", kv, axes.KV_HEADS))
    )
    return AttentionLayerParams(qkv, out, q_norm, k_norm)


def _mlp(width: int, hidden: int, names: DecoderNames, prefix: str) -> MlpParams:
    return MlpParams(
        gate_up=_fused(
            prefix, names.gate_up, (Part(hidden, 1),) * 2, width, names.mlp_bias, (axes.GATE_UP, axes.HIDDEN)
        ),
        down=_linear(prefix, "mlp.down_proj", width, hidden, names.mlp_bias, (axes.HIDDEN, axes.FFN)),
    )


def _fused(prefix, modules, parts, width, bias, logical) -> Linear:
    rows = tuple(part.units * part.width for part in parts)
    total = sum(rows)
    named = list(zip(modules, rows if len(modules) > 1 else (total,), strict=True))
    weight = tuple(Source(f"{prefix}{module}.weight", (size, width)) for module, size in named)
    biases = tuple(Source(f"{prefix}{module}.bias", (size,)) for module, size in named)
    return Linear(
        weight=ParamSpec((total, width), logical, weight, stacked_rows, parts=parts),
        bias=ParamSpec((total,), logical[:1], biases, stacked_rows, parts=parts) if bias else (),
    )


def _linear(prefix, module, rows, columns, bias, logical) -> Linear:
    return Linear(
        weight=ParamSpec((rows, columns), logical, (Source(f"{prefix}{module}.weight", (rows, columns)),)),
        bias=ParamSpec((rows,), logical[:1], (Source(f"{prefix}{module}.bias", (rows,)),)) if bias else (),
    )
