# SPDX-License-Identifier: Apache-2.0
"""Qwen2 (Yang et al. 2024): Llama's block with biases on q, k and v, and a window in the upper layers if asked."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
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
from metrale_jax.models.gguf_rules import header_config, unchanged
from metrale_jax.models.hf_config import RawConfig


def windowed_attentions(raw: RawConfig) -> list:
    """Qwen's attention layers: a window, where it is used at all, from `max_window_layers` up."""
    count = raw.positive("num_hidden_layers")
    window = window_of(raw) if raw.flag("use_sliding_window") else 0
    first = raw.get("max_window_layers")
    kinds = layer_types(raw, ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)])
    rope = flat_rope(raw)
    return [attention_config(raw, rope, window=window if kind == "sliding_attention" else 0) for kind in kinds]


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen2 checkpoint."""
    config = model_config(raw, "qwen2", windowed_attentions(raw), "hidden_act")
    return Description(config, decoder_specs(config, DecoderNames(qkv_bias=True)))


FAMILY = Family(
    name="qwen2",
    describe=describe,
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    gguf=GgufRules(header_config, unchanged),
)
