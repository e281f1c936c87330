# SPDX-License-Identifier: Apache-2.0
"""Mistral (Jiang et al. 2023): Llama's block with a sliding window in every layer."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    GgufRules,
    attention_config,
    flat_rope,
    model_config,
    window_of,
)
from metrale_jax.models.gguf_rules import header_config, unpermuted_qk
from metrale_jax.models.hf_config import RawConfig


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Mistral checkpoint."""
    attention = attention_config(raw, flat_rope(raw), window=window_of(raw))
    config = model_config(raw, "mistral", [attention] * raw.positive("num_hidden_layers"), "hidden_act")
    return Description(config, decoder_specs(config, DecoderNames()))


FAMILY = Family(
    name="mistral",
    describe=describe,
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    gguf=GgufRules(header_config, unpermuted_qk),
)
