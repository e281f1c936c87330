# SPDX-License-Identifier: Apache-2.0
"""Granite (IBM 2024): Llama's block with multipliers on embeddings, attention, residuals and logits."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import Description, Family, GgufRules, attention_config, flat_rope, model_config
from metrale_jax.models.gguf_rules import header_config, unpermuted_qk
from metrale_jax.models.hf_config import RawConfig


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Granite checkpoint."""
    attention = attention_config(raw, flat_rope(raw), scale=raw.number("attention_multiplier"))
    config = model_config(
        raw,
        "granite",
        [attention] * raw.positive("num_hidden_layers"),
        "hidden_act",
        embed_scale=raw.number("embedding_multiplier"),
        residual_scale=raw.number("residual_multiplier"),
        logit_scale=1.0 / raw.number("logits_scaling"),
    )
    bias = raw.flag("attention_bias")
    names = DecoderNames(qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias"))
    return Description(config, decoder_specs(config, names))


def gguf_config(architecture, fields, tensors) -> dict:
    """The header as a raw config, multipliers included."""
    own = {key: fields.get(f"{architecture}.{key}") for key in ("attention.scale", "embedding_scale", "residual_scale")}
    return header_config(architecture, fields, tensors) | {
        "attention_multiplier": own["attention.scale"],
        "embedding_multiplier": own["embedding_scale"],
        "residual_multiplier": own["residual_scale"],
        "logits_scaling": fields.get(f"{architecture}.logit_scale"),
    }


FAMILY = Family(
    name="granite",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    gguf=GgufRules(gguf_config, unpermuted_qk),
)
