# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Dao and Gu 2024; Codestral Mamba): nothing but Mamba-2 layers, each after its norm."""

from metrale_jax.core.config import LayerConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs, with_norms
from metrale_jax.models.family import Description, Family, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.mamba2_specs import ENDLESS, Mamba2Names, mamba2_config, mamba2_specs, silu_only, step_limits
from metrale_jax.models.stack import LayerParams

FIELDS = {
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "num_groups": "n_groups",
    "state_dim": "state_size",
    "conv_width": "conv_kernel",
}
NAMES = DecoderNames(
    mixer_norm="norm",
    mlp_norm="",
    embed="backbone.embeddings.weight",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f.weight",
)


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Mamba-2 checkpoint. It bounds no context."""
    silu_only(raw, "hidden_act")
    inner_dim = int(raw.number("expand") * raw.positive("hidden_size"))
    layer = LayerConfig((mamba2_config(raw, FIELDS, inner_dim, **step_limits(raw)),), None)
    config = layered_config(
        raw,
        "mamba2",
        [layer] * raw.positive("num_hidden_layers"),
        max_context_tokens=ENDLESS,
        norm_eps=raw.number("layer_norm_epsilon"),
    )
    bias = raw.flag("use_bias")
    parts = Mamba2Names("mixer.", in_bias=bias, out_bias=bias, conv_bias=raw.flag("use_conv_bias"))

    def specs(config, layer, names, prefix):
        (mixer,) = layer.mixers
        params = LayerParams((mamba2_specs(config.hidden_dim, mixer, parts, prefix),))
        return with_norms(params, config, names, prefix)

    return Description(config, decoder_specs(config, NAMES, specs))


FAMILY = Family(
    name="mamba2",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
    },
)
