# SPDX-License-Identifier: Apache-2.0
"""Llama (Touvron et al. 2023; SmolLM2, Llama 3): pre-norm, gated SiLU, grouped queries, optional biases."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import Description, Family, GgufRules, attention_config, flat_rope, model_config
from metrale_jax.models.gguf_rules import header_config, unpermuted_qk
from metrale_jax.models.hf_config import RawConfig


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Llama checkpoint."""
    attention = attention_config(raw, flat_rope(raw))
    config = model_config(raw, "llama", [attention] * raw.positive("num_hidden_layers"), "hidden_act")
    bias = raw.flag("attention_bias")
    names = DecoderNames(qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias"))
    return Description(config, decoder_specs(config, names))


FAMILY = Family(
    name="llama",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    gguf=GgufRules(header_config, unpermuted_qk),
)
