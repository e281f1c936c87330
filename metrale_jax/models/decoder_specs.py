# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of the shared decoder under the names that Hugging Face checkpoints use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, ModelConfig
from metrale_jax.core.specs import ParamSpec, Part, Source, Transform, identity, stacked_rows
from metrale_jax.layers.attention import AttentionLayerParams
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.stack import LayerParams
from metrale_jax.sharding import axes


def one_plus(array: np.ndarray) -> np.ndarray:
    """`1 + w` in float32: norms whose checkpoint stores the distance from one."""
    return array.astype(np.float32) + np.float32(1)


@dataclass(frozen=True)
class DecoderNames:
    """What a checkpoint calls a model's parts, and what its layers contain. An empty norm name means that the norm does
    not exist; `layer` is the prefix of layer `{}`.

    `qkv` and `gate_up` list the projections that are stacked, in order; one name means that the file stores them
    stacked. `qk_norm` is "none", "head" for a norm over each head or "full" for one over all heads.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mixer_norm: str = "input_layernorm"
    mixer_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qk_norm: str = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_transform: Transform = identity
    embed: str = "model.embed_tokens.weight"
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


LayerSpecs = Callable[[ModelConfig, LayerConfig, DecoderNames, str], LayerParams]


def dense_layer(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
    """Specs of a layer of one attention and a gated feed-forward layer, whose tensors begin with `prefix`."""
    (attention,) = layer.mixers
    return with_norms(
        LayerParams(
            mixers=(attention_specs(config.hidden_dim, attention, names, prefix),),
            mlp=mlp_specs(config.hidden_dim, layer.mlp.hidden_dim, names, prefix),
        ),
        config,
        names,
        prefix,
    )


def with_norms(params: LayerParams, config: ModelConfig, names: DecoderNames, prefix: str) -> LayerParams:
    """The specs with those of the norms that `names` names."""

    def norm(name):
        return norm_spec(f"{prefix}{name}.weight", config.hidden_dim, names) if name else ()

    return params.replace(
        mixer_norm=norm(names.mixer_norm),
        mixer_post_norm=norm(names.mixer_post_norm),
        mlp_norm=norm(names.mlp_norm),
        mlp_post_norm=norm(names.mlp_post_norm),
    )


def decoder_specs(config: ModelConfig, names: DecoderNames, layer: LayerSpecs = dense_layer) -> DecoderParams:
    """A tree of `ParamSpec` shaped like the decoder's params; `layer` makes those of one layer."""
    vocab, width = config.vocab_size, config.hidden_dim
    table_axes = (axes.VOCAB, axes.HIDDEN)
    head = ParamSpec((vocab, width), table_axes, (Source(names.head, (vocab, width)),))
    return DecoderParams(
        embed=ParamSpec((vocab, width), table_axes, (Source(names.embed, (vocab, width)),)),
        layers=tuple(layer(config, one, names, names.layer.format(i)) for i, one in enumerate(config.layers)),
        final_norm=norm_spec(names.final_norm, width, names),
        head=() if config.tie_embeddings else head,
    )


def norm_spec(name: str, width: int, names: DecoderNames) -> ParamSpec:
    """A norm's weight `[width]`, kept in float32."""
    return ParamSpec((width,), (axes.HIDDEN,), (Source(name, (width,)),), names.norm_transform, keep_float32=True)


def attention_specs(width: int, layer: AttentionConfig, names: DecoderNames, prefix: str) -> AttentionLayerParams:
    """Specs of an attention layer's weights on inputs of `width`."""
    query, kv = Part(layer.num_heads, layer.head_dim), Part(layer.num_kv_heads, layer.head_dim)
    qkv = fused_specs(prefix, names.qkv, (query, kv, kv), width, names.qkv_bias, (axes.QKV, axes.HIDDEN))
    columns = query.units * query.width
    out = linear_specs(prefix, names.attention_out, width, columns, names.out_bias, (axes.HIDDEN, axes.HEADS))
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


def mlp_specs(width: int, hidden: int, names: DecoderNames, prefix: str, gated: bool = True) -> MlpParams:
    """Specs of a feed-forward layer's weights; without a gate `names.gate_up` has the up projection's name alone."""
    parts = (Part(hidden, 1),) * (2 if gated else 1)
    return MlpParams(
        gate_up=fused_specs(prefix, names.gate_up, parts, width, names.mlp_bias, (axes.GATE_UP, axes.HIDDEN)),
        down=linear_specs(prefix, names.down, width, hidden, names.mlp_bias, (axes.HIDDEN, axes.FFN)),
    )


def fused_specs(
    prefix: str,
    modules: Sequence[str],
    parts: tuple[Part, ...],
    width: int,
    bias: bool,
    logical: tuple[str, str],
) -> Linear:
    """One linear layer of what the file stores as `modules`, a part each, or as one module that holds all parts."""
    rows = tuple(part.units * part.width for part in parts)
    total = sum(rows)
    named = list(zip(modules, rows if len(modules) > 1 else (total,), strict=True))
    weight = tuple(Source(f"{prefix}{module}.weight", (size, width)) for module, size in named)
    biases = tuple(Source(f"{prefix}{module}.bias", (size,)) for module, size in named)
    return Linear(
        weight=ParamSpec((total, width), logical, weight, stacked_rows, parts=parts),
        bias=ParamSpec((total,), logical[:1], biases, stacked_rows, parts=parts) if bias else (),
    )


def linear_specs(prefix: str, module: str, rows: int, columns: int, bias: bool, logical: tuple[str, str]) -> Linear:
    """A linear layer `[rows, columns]` as the file stores it."""
    return Linear(
        weight=ParamSpec((rows, columns), logical, (Source(f"{prefix}{module}.weight", (rows, columns)),)),
        bias=ParamSpec((rows,), logical[:1], (Source(f"{prefix}{module}.bias", (rows,)),)) if bias else (),
    )
