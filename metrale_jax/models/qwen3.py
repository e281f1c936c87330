# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (Yang et al. 2025): Qwen2 with a norm over each query and key head and no biases by default."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import Description, Family, GgufRules, model_config
from metrale_jax.models.gguf_rules import header_config, unchanged
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.qwen2 import windowed_attentions


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen3 checkpoint."""
    config = model_config(raw, "qwen3", windowed_attentions(raw), "hidden_act")
    bias = raw.flag("attention_bias")
    return Description(config, decoder_specs(config, DecoderNames(qk_norm="head", qkv_bias=bias, out_bias=bias)))


FAMILY = Family(
    name="qwen3",
    describe=describe,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    gguf=GgufRules(header_config, unchanged),
)
