# SPDX-License-Identifier: Apache-2.0
"""Phi-3 (Abdin et al. 2024): Llama's block stored fused, partial rotary, LongRoPE, a window in every layer if asked."""

from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    GgufRules,
    attention_config,
    head_dim_of,
    model_config,
    window_of,
)
from metrale_jax.models.gguf_rules import header_config, unchanged
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.rope_config import parse_rope, rope_params, rope_type

# Early checkpoints call LongRoPE by these names.
LONGROPE_NAMES = ("su", "yarn")


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Phi-3 checkpoint."""
    fields = dict(rope_params(raw))
    if rope_type(fields) in LONGROPE_NAMES:
        fields["rope_type"] = "longrope"
    rope = parse_rope(raw, fields, head_dim_of(raw), 10_000.0, partial=True)
    attention = attention_config(raw, rope, window=window_of(raw))
    config = model_config(
        raw, "phi3", [attention] * raw.positive("num_hidden_layers"), "hidden_act", recompute_len=rope.switch_len
    )
    names = DecoderNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return Description(config, decoder_specs(config, names))


def gguf_config(architecture, fields, tensors) -> dict:
    """The header as a raw config; the length before LongRoPE moves to where this family looks for it."""
    config = header_config(architecture, fields, tensors)
    original = fields.get(f"{architecture}.rope.scaling.original_context_length")
    return config | ({"original_max_position_embeddings": original} if original else {})


FAMILY = Family(
    name="phi3",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    gguf=GgufRules(gguf_config, unchanged),
)
