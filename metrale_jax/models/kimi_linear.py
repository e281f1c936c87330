# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear (Kimi Team 2025): Kimi delta attention in most layers, latent attention without positions in the others,
mixtures of experts after the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metrale_jax.core.config import LayerConfig, MlpConfig, ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.specs import ParamSpec, Source, stacked_rows
from metrale_jax.layers.kda import KdaConfig, KdaParams
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mla import MlaConfig, MlaParams
from metrale_jax.layers.moe import MoeConfig, RouterConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs, linear_specs, mlp_specs, with_norms
from metrale_jax.models.delta_specs import KINDS, ONLY, flattened, kinds, numbers_spec, rows_spec, taps_spec
from metrale_jax.models.family import Description, Family, activation_of, either, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import ExpertNames, moe_specs
from metrale_jax.models.stack import LayerParams
from metrale_jax.sharding import axes
from pallas_kernels.activations import Activation

EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
    correction="block_sparse_moe.gate.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts",
    float32_router=True,
)


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Kimi Linear checkpoint."""
    activation = activation_of(raw)
    width = raw.positive("moe_intermediate_size")
    shared = width * raw.positive(either(raw, "num_shared_experts", "n_shared_experts"))
    ends = {
        "dense": MlpConfig(raw.positive("intermediate_size"), activation),
        "sparse": MoeConfig(_router(raw), width, Activation(activation), MlpConfig(shared, activation)),
    }
    mixers = {"linear_attention": _kda(raw), "full_attention": _mla(raw)}
    each = zip(_mixer_types(raw), _mlp_types(raw), strict=True)
    config = layered_config(
        raw,
        "kimi_linear",
        [LayerConfig((mixers[mixer],), ends[end]) for mixer, end in each],
        max_context_tokens=raw.positive(either(raw, "model_max_length", "max_position_embeddings")),
    )
    return Description(config, decoder_specs(config, DecoderNames(), _specs))


def _router(raw: RawConfig) -> RouterConfig:
    return RouterConfig(
        num_experts=raw.positive(either(raw, "num_experts", "num_local_experts")),
        top_k=raw.positive(either(raw, "num_experts_per_token", "num_experts_per_tok")),
        scoring="sigmoid",
        renormalised=raw.flag(either(raw, "moe_renormalize", "norm_topk_prob")),
        scale=raw.number("routed_scaling_factor"),
        num_groups=raw.positive(either(raw, "num_expert_group", "n_group")),
        top_groups=raw.positive("topk_group"),
    )


def _kda(raw: RawConfig) -> KdaConfig:
    nested, origin = raw.table("linear_attn_config"), raw.origin
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    values = {key: nested.get(key, raw.get(flat)) for key, flat in names.items()}
    own = RawConfig(values, {}, f"linear_attn_config of {origin}")
    return KdaConfig(*map(own.positive, names), norm_eps=raw.number("rms_norm_eps"))


def _mla(raw: RawConfig) -> MlaConfig:
    if raw.get("q_lora_rank") is not None or raw.flag("attention_bias"):
        raise ConfigError(
            f"q_lora_rank={raw.get('q_lora_rank')!r} or attention_bias in {raw.origin} is not supported; Kimi Linear's "
            "checkpoints have neither."
        )
    own, shared, heads = (raw.positive(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"))
    if raw.get("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"num_key_value_heads={raw.get('num_key_value_heads')!r} in {raw.origin} is not num_attention_heads="
            f"{heads}: a latent is widened for each head; correct either."
        )
    return MlaConfig(
        num_heads=heads,
        rank=raw.positive("kv_lora_rank"),
        own_dim=own,
        shared_dim=shared,
        v_dim=raw.positive("v_head_dim"),
        scale=(own + shared) ** -0.5,
    )


def _mixer_types(raw: RawConfig) -> list[str]:
    nested: Mapping[str, Any] = raw.table("linear_attn_config")
    count = raw.positive("num_hidden_layers")
    full, delta = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None and delta is None:
        return kinds(raw, [KINDS[bool(index) and index % 4 == 0] for index in range(count)])
    # Counted from one.
    if not (isinstance(full, list) and isinstance(delta, list)) or sorted(full + delta) != list(range(1, count + 1)):
        raise ConfigError(
            f"full_attn_layers={full!r} and kda_layers={delta!r} in linear_attn_config of {raw.origin} do not list "
            f"each layer from 1 to {count} once; correct the config."
        )
    found = [KINDS[index + 1 in full] for index in range(count)]
    if kinds(raw, found) != found:
        raise ConfigError(f"layer_types in {raw.origin} contradicts full_attn_layers={full!r}; correct either.")
    return found


def _mlp_types(raw: RawConfig) -> list[str]:
    count, dense = raw.positive("num_hidden_layers"), raw.get("first_k_dense_replace", 1)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= count:
        raise ConfigError(
            f"first_k_dense_replace={dense!r} in {raw.origin} is not a number of layers from 0 to {count}; correct the "
            "config."
        )
    found = raw.get("mlp_layer_types") or ["dense" if index < dense else "sparse" for index in range(count)]
    if len(found) != count or not set(found) <= {"dense", "sparse"}:
        raise ConfigError(
            f"mlp_layer_types={found!r} in {raw.origin} must say dense or sparse for each of the {count} layers; "
            "correct the config."
        )
    return list(found)


def _specs(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
    (mixer,), width = layer.mixers, config.hidden_dim
    mixed = _mla_specs(width, mixer, prefix) if isinstance(mixer, MlaConfig) else _kda_specs(width, mixer, prefix)
    if isinstance(layer.mlp, MoeConfig):
        end = moe_specs(width, layer.mlp, EXPERTS, prefix)
    else:
        end = mlp_specs(width, layer.mlp.hidden_dim, names, prefix)
    return with_norms(LayerParams((mixed,), end), config, names, prefix)


def _kda_specs(width: int, layer: KdaConfig, prefix: str) -> KdaParams:
    heads, dim, module = layer.num_heads, layer.head_dim, f"{prefix}self_attn."
    columns = heads * dim
    rows = {"q": columns, "k": columns, "v": columns, "f_a": dim, "g_a": dim, "b": heads}
    inputs = tuple((f"self_attn.{name}_proj", count) for name, count in rows.items())
    wide = (axes.STATE, axes.STATE)
    return KdaParams(
        inputs=Linear(rows_spec(prefix, inputs, width, stacked_rows)),
        decays=linear_specs(module, "f_b_proj", columns, dim, False, wide),
        gate=linear_specs(module, "g_b_proj", columns, dim, False, wide),
        taps=taps_spec(prefix, tuple(f"self_attn.{name}_conv1d" for name in "qkv"), layer.heads),
        rate=numbers_spec(f"{module}A_log", (1, 1, heads, 1), flattened),
        rate_bias=numbers_spec(f"{module}dt_bias", (columns,)),
        norm=numbers_spec(f"{module}o_norm.weight", (dim,)),
        out=linear_specs(module, "o_proj", width, columns, False, (axes.HIDDEN, axes.STATE)),
    )


@dataclass(frozen=True)
class OfEachHead:
    """A transform: rows `first` to `last` of each head's, `[N, last - first, r]`."""

    num_heads: int
    first: int
    last: int

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The rows."""
        return array.reshape(self.num_heads, -1, array.shape[1])[:, self.first : self.last]


def _mla_specs(width: int, layer: MlaConfig, prefix: str) -> MlaParams:
    heads, own, v_dim, rank = layer.num_heads, layer.own_dim, layer.v_dim, layer.rank
    module = f"{prefix}self_attn."
    inputs = (
        ("self_attn.q_proj", heads * (own + layer.shared_dim)),
        ("self_attn.kv_a_proj_with_mqa", rank + layer.shared_dim),
    )
    source = (Source(f"{module}kv_b_proj.weight", (heads * (own + v_dim), rank)),)

    def widening(first, last):
        logical = (axes.HEADS, axes.HEAD_DIM, axes.STATE)
        return ParamSpec((heads, last - first, rank), logical, source, OfEachHead(heads, first, last))

    return MlaParams(
        inputs=Linear(rows_spec(prefix, inputs, width, stacked_rows)),
        norm=numbers_spec(f"{module}kv_a_layernorm.weight", (rank,)),
        keys=widening(0, own),
        values=widening(own, own + v_dim),
        out=linear_specs(module, "o_proj", width, heads * v_dim, False, (axes.HIDDEN, axes.HEADS)),
    )


FAMILY = Family(
    name="kimi_linear",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "model_max_length": 1048576,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    only={**ONLY, "moe_router_activation_func": ("sigmoid",), "mla_use_nope": (True,), "moe_layer_freq": (1,)},
)
