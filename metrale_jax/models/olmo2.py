# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (OLMo Team 2024): norms after each part only, and one norm over all query and all key heads."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import Description, Family, GgufRules, attention_config, flat_rope, model_config
from metrale_jax.models.gguf_rules import header_config, unchanged
from metrale_jax.models.hf_config import RawConfig


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of an OLMo 2 checkpoint."""
    attention = attention_config(raw, flat_rope(raw))
    config = model_config(raw, "olmo2", [attention] * raw.positive("num_hidden_layers"), "hidden_act")
    bias = raw.flag("attention_bias")
    names = DecoderNames(
        mixer_norm="",
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="",
        mlp_post_norm="post_feedforward_layernorm",
        qk_norm="full",
        qkv_bias=bias,
        out_bias=bias,
    )
    return Description(config, decoder_specs(config, names))


FAMILY = Family(
    name="olmo2",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    gguf=GgufRules(header_config, unchanged),
)
