# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 text (Gemma Team 2025): Gemma 2 with head norms for softcaps and a rope of their own in local layers."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    GgufRules,
    attention_config,
    head_dim_of,
    layer_types,
    model_config,
    window_of,
)
from metrale_jax.models.gemma2 import NORMS, norms_minus_one
from metrale_jax.models.gguf_rules import header_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.rope_config import parse_rope

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Gemma 3 text checkpoint."""
    count, every = raw.positive("num_hidden_layers"), raw.positive("sliding_window_pattern")
    kinds = layer_types(raw, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)])
    ropes = _ropes(raw)
    scale = raw.number("query_pre_attn_scalar") ** -0.5
    windows = {"sliding_attention": window_of(raw), "full_attention": 0}
    config = model_config(
        raw,
        "gemma3",
        [attention_config(raw, ropes[kind], scale=scale, window=windows[kind]) for kind in kinds],
        "hidden_activation",
        embed_scale=raw.positive("hidden_size") ** 0.5,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0),
    )
    bias = raw.flag("attention_bias")
    names = DecoderNames(qk_norm="head", qkv_bias=bias, out_bias=bias, **NORMS)
    return Description(config, decoder_specs(config, names))


def _ropes(raw: RawConfig) -> dict:
    nested = raw.table("rope_parameters")
    whole = {**(nested.get("full_attention") or {}), **raw.table("rope_scaling")}
    local = dict(nested.get("sliding_attention") or {})
    local.setdefault("rope_theta", raw.get("rope_local_base_freq", LOCAL_THETA))
    width = head_dim_of(raw)
    return {
        "full_attention": parse_rope(raw, whole, width, GLOBAL_THETA),
        "sliding_attention": parse_rope(raw, local, width, LOCAL_THETA),
    }


def gguf_config(architecture, fields, tensors) -> dict:
    """The header as a raw config. The 27B model alone scales queries by its width per head."""
    config = header_config(architecture, fields, tensors)
    wide = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
    config["final_logit_softcapping"] = fields.get(f"{architecture}.final_logit_softcapping")
    return config


FAMILY = Family(
    name="gemma3",
    describe=describe,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    gguf=GgufRules(gguf_config, norms_minus_one),
)
