# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 (Gemma Team 2024): norms before and after each part, both softcaps, every other layer windowed."""

from metrale_jax.core.config import ModelConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs, one_plus
from metrale_jax.models.family import (
    Description,
    Family,
    GgufRules,
    attention_config,
    flat_rope,
    layer_types,
    model_config,
    window_of,
)
from metrale_jax.models.gguf_rules import header_config, minus_one
from metrale_jax.models.hf_config import RawConfig

NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "norm_transform": one_plus,
}


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Gemma 2 checkpoint."""
    count = raw.positive("num_hidden_layers")
    kinds = layer_types(raw, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    rope, cap = flat_rope(raw), raw.get("attn_logit_softcapping")
    scale = raw.number("query_pre_attn_scalar") ** -0.5
    attentions = [
        attention_config(
            raw, rope, scale=scale, softcap=float(cap or 0), window=window_of(raw) if kind == "sliding_attention" else 0
        )
        for kind in kinds
    ]
    config = model_config(
        raw,
        "gemma2",
        attentions,
        "hidden_activation",
        embed_scale=raw.positive("hidden_size") ** 0.5,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0),
    )
    bias = raw.flag("attention_bias")
    return Description(config, decoder_specs(config, DecoderNames(qkv_bias=bias, out_bias=bias, **NORMS)))


def gguf_config(architecture, fields, tensors) -> dict:
    """The header as a raw config. The 27B model alone scales queries by its width per head."""
    config = header_config(architecture, fields, tensors)
    wide = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    config["attn_logit_softcapping"] = fields.get(f"{architecture}.attn_logit_softcapping")
    config["final_logit_softcapping"] = fields.get(f"{architecture}.final_logit_softcapping")
    return config


def norms_minus_one(config: ModelConfig) -> dict:
    """Takes the one back from every norm that a Gemma GGUF holds."""
    del config
    suffixes = [name for name in NORMS.values() if isinstance(name, str)]
    return {f"{name}.weight": minus_one for name in (*suffixes, "self_attn.q_norm", "self_attn.k_norm", "model.norm")}


FAMILY = Family(
    name="gemma2",
    describe=describe,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    gguf=GgufRules(gguf_config, norms_minus_one),
)
