# SPDX-License-Identifier: Apache-2.0
"""Bamba (IBM, Princeton, UIUC 2024): Llama's block with Mamba-2 in the place of attention in all but a few layers."""

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.models.decoder_specs import DecoderNames, attention_specs, decoder_specs, mlp_specs, with_norms
from metrale_jax.models.family import Description, Family, activation_of, attention_config, flat_rope, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.mamba2_specs import Mamba2Names, mamba2_config, mamba2_specs, silu_only, step_limits
from metrale_jax.models.stack import LayerParams

FIELDS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "num_groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "conv_width": "mamba_d_conv",
}


def feed_forward_names(**changes) -> DecoderNames:
    """Names of Bamba's norms and feed-forward layers, which Falcon-H1 has too."""
    return DecoderNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
        final_norm="model.final_layernorm.weight",
        **changes,
    )


def head_dim(raw: RawConfig, inner_dim: int) -> int:
    """A Mamba head's width, which may be left to follow from their count."""
    if raw.get("mamba_d_head", "auto") != "auto":
        return raw.positive("mamba_d_head")
    return inner_dim // raw.positive("mamba_n_heads")


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Bamba checkpoint."""
    silu_only(raw, "hidden_act")
    inner_dim = int(raw.number("mamba_expand") * raw.positive("hidden_size"))
    mamba = mamba2_config(raw, FIELDS, inner_dim, head_dim=head_dim(raw, inner_dim), **step_limits(raw))
    attention = attention_config(raw, flat_rope(raw, partial=True))
    feed_forward = MlpConfig(raw.positive("intermediate_size"), activation_of(raw))
    attends = attention_layers(raw)
    layers = [
        LayerConfig((attention if index in attends else mamba,), feed_forward)
        for index in range(raw.positive("num_hidden_layers"))
    ]
    config = layered_config(raw, "bamba", layers)
    bias = raw.flag("mamba_proj_bias")
    parts = Mamba2Names(in_bias=bias, out_bias=bias, conv_bias=raw.flag("mamba_conv_bias"))
    attention_bias = raw.flag("attention_bias")
    names = feed_forward_names(qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=raw.flag("mlp_bias"))

    def specs(config, layer, names, prefix):
        (mixer,) = layer.mixers
        if isinstance(mixer, AttentionConfig):
            mixer_specs = attention_specs(config.hidden_dim, mixer, names, prefix)
        else:
            mixer_specs = mamba2_specs(config.hidden_dim, mixer, parts, prefix)
        mlp = mlp_specs(config.hidden_dim, layer.mlp.hidden_dim, names, prefix)
        return with_norms(LayerParams((mixer_specs,), mlp), config, names, prefix)

    return Description(config, decoder_specs(config, names, specs))


def attention_layers(raw: RawConfig) -> set[int]:
    """The indices of the layers that attend."""
    listed, count = raw.get("attn_layer_indices", []), raw.positive("num_hidden_layers")
    if not isinstance(listed, list | tuple) or not all(index in range(count) for index in listed):
        raise ConfigError(
            f"attn_layer_indices={listed!r} in {raw.origin} must list layers from 0 to {count - 1}; correct the config."
        )
    return set(listed)


FAMILY = Family(
    name="bamba",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    # What transformers takes it for, whatever the file says.
    only={"partial_rotary_factor": (0.5,), "sliding_window": ()},
)
