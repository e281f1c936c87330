# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with mixtures of experts (Qwen Team 2026), the text of it."""

from metrale_jax.models.decoder_specs import decoder_specs
from metrale_jax.models.family import Description, Family, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.qwen3_5 import plain_names, text_names
from metrale_jax.models.qwen3_next import DEFAULTS, IGNORED, ONLY, hybrid_layers, hybrid_specs, next_layer


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen3.5 MoE checkpoint, with or without what sees."""
    config = layered_config(raw, "qwen3_5_moe", hybrid_layers(raw, [True] * raw.positive("num_hidden_layers")))
    return Description(config, decoder_specs(config, text_names(raw), hybrid_specs(plain_names)))


FAMILY = Family(
    name="qwen3_5_moe",
    describe=describe,
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
    },
    ignored=IGNORED,
    text_config="text_config",
    # Weights of experts are renormalised in transformers too, whose config has no such field.
    only={**ONLY, "norm_topk_prob": (True,)},
    next_layer=next_layer,
)
