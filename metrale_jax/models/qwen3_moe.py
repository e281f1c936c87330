# SPDX-License-Identifier: Apache-2.0
"""Qwen3 MoE (Yang et al. 2025): Qwen3's attention with a mixture of experts in most or all layers."""

from metrale_jax.core.config import LayerConfig, MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.moe import MoeConfig, RouterConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    activation_of,
    attention_config,
    either,
    flat_rope,
    layered_config,
    window_of,
)
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import ExpertNames, mixture_layers
from pallas_kernels.activations import Activation


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen3 MoE checkpoint."""
    window = window_of(raw) if raw.flag("use_sliding_window") else 0
    attention = attention_config(raw, flat_rope(raw), window=window)
    activation = activation_of(raw)
    router = RouterConfig(
        num_experts=raw.positive(either(raw, "num_local_experts", "num_experts")),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="softmax",
        renormalised=raw.flag("norm_topk_prob"),
    )
    mixture = MoeConfig(router, raw.positive("moe_intermediate_size"), Activation(activation))
    dense = MlpConfig(raw.positive("intermediate_size"), activation)
    layers = [LayerConfig((attention,), mixture if sparse else dense) for sparse in sparse_layers(raw)]
    config = layered_config(raw, "qwen3_moe", layers)
    bias = raw.flag("attention_bias")
    names = DecoderNames(qk_norm="head", qkv_bias=bias, out_bias=bias)
    return Description(config, decoder_specs(config, names, mixture_layers(ExpertNames())))


def sparse_layers(raw: RawConfig) -> list[bool]:
    """Whether each layer ends in a mixture: every `decoder_sparse_step`th does, but for `mlp_only_layers`."""
    count, step = raw.positive("num_hidden_layers"), raw.positive("decoder_sparse_step")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not set(dense) <= set(range(count)):
        raise ConfigError(
            f"mlp_only_layers={dense!r} in {raw.origin} does not list layers from 0 to {count - 1}; correct the config."
        )
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


FAMILY = Family(
    name="qwen3_moe",
    describe=describe,
    defaults={
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
)
