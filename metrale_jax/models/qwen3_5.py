# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 (Qwen Team 2026), the text of it: Qwen3-Next's layers with plain feed-forward layers.

Its checkpoints are those of a model that sees: the text's config is a field of the file's, and what belongs to images
is passed over.
"""

from metrale_jax.layers.delta_rule import DeltaHeads
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.delta_specs import DeltaNames
from metrale_jax.models.family import Description, Family, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.qwen3_next import (
    DEFAULTS,
    IGNORED,
    ONLY,
    hybrid_layers,
    hybrid_specs,
    next_layer,
    norms_from_one,
)


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen3.5 checkpoint, with or without what sees."""
    config = layered_config(raw, "qwen3_5", hybrid_layers(raw, [False] * raw.positive("num_hidden_layers")))
    return Description(config, decoder_specs(config, text_names(raw), hybrid_specs(plain_names)))


def text_names(raw: RawConfig) -> DecoderNames:
    """The decoder's names, which are longer beside a part that sees."""
    if not raw.table("vision_config"):
        return norms_from_one(raw)
    inner = "model.language_model."
    return norms_from_one(
        raw,
        embed=f"{inner}embed_tokens.weight",
        layer=inner + "layers.{}.",
        final_norm=f"{inner}norm.weight",
    )


def plain_names(heads: DeltaHeads) -> DeltaNames:
    """Gated DeltaNet's inputs in four tensors."""
    parts = {
        "in_proj_qkv": heads.channels,
        "in_proj_z": heads.heads * heads.value_dim,
        "in_proj_b": heads.heads,
        "in_proj_a": heads.heads,
    }
    return DeltaNames(inputs=tuple((f"linear_attn.{name}", rows) for name, rows in parts.items()))


FAMILY = Family(
    name="qwen3_5",
    describe=describe,
    defaults=DEFAULTS | {"num_key_value_heads": 4},
    ignored=IGNORED,
    text_config="text_config",
    only=ONLY,
    next_layer=next_layer,
)
