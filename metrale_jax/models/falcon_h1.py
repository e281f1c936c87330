# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side in every layer, and a multiplier for all that they touch.

Multipliers of projections' inputs and outputs are folded into their weights while these are loaded.
"""

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.attention import AttentionLayerParams
from metrale_jax.layers.mamba2 import Mamba2Config, Mamba2Params
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.models.bamba import FIELDS, feed_forward_names, head_dim
from metrale_jax.models.decoder_specs import attention_specs, decoder_specs, mlp_specs, with_norms
from metrale_jax.models.family import Description, Family, activation_of, attention_config, flat_rope, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.mamba2_specs import (
    Mamba2Names,
    mamba2_config,
    mamba2_specs,
    scaled,
    silu_only,
    step_limits,
)
from metrale_jax.models.stack import LayerParams


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Falcon-H1 checkpoint."""
    silu_only(raw, "hidden_act")
    expanded = raw.number("mamba_expand") * raw.positive("hidden_size")
    inner_dim = int(expanded) if raw.given_as_null("mamba_d_ssm") else raw.positive("mamba_d_ssm")
    mamba = mamba2_config(
        raw,
        FIELDS,
        inner_dim,
        head_dim=head_dim(raw, inner_dim),
        norm_before_gate=raw.flag("mamba_norm_before_gate"),
        **step_limits(raw),
    )
    attention = attention_config(raw, flat_rope(raw))
    feed_forward = MlpConfig(raw.positive("intermediate_size"), activation_of(raw))
    config = layered_config(
        raw,
        "falcon_h1",
        [LayerConfig((mamba, attention), feed_forward)] * raw.positive("num_hidden_layers"),
        embed_scale=raw.number("embedding_multiplier"),
        logit_scale=raw.number("lm_head_multiplier"),
    )
    bias = raw.flag("attention_bias")
    names = feed_forward_names(qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias"))
    parts = Mamba2Names(
        in_bias=raw.flag("mamba_proj_bias"),
        out_bias=raw.flag("projectors_bias"),
        conv_bias=raw.flag("mamba_conv_bias"),
        norm=raw.flag("mamba_rms_norm"),
    )

    def specs(config, layer, names, prefix):
        width, (mamba, attention) = config.hidden_dim, layer.mixers
        return with_norms(
            LayerParams(
                mixers=(
                    scaled_mamba(raw, mamba, mamba2_specs(width, mamba, parts, prefix)),
                    scaled_attention(raw, attention, attention_specs(width, attention, names, prefix)),
                ),
                mlp=scaled_mlp(raw, layer.mlp, mlp_specs(width, layer.mlp.hidden_dim, names, prefix)),
            ),
            config,
            names,
            prefix,
        )

    return Description(config, decoder_specs(config, names, specs))


def scaled_mamba(raw: RawConfig, layer: Mamba2Config, specs: Mamba2Params) -> Mamba2Params:
    """The specs with `ssm_in_multiplier`, one of `ssm_multipliers` for each part of the first projection, and
    `ssm_out_multiplier`."""
    shared = layer.num_groups * layer.state_dim
    rows = (layer.inner_dim, layer.inner_dim, shared, shared, layer.num_heads)
    runs = tuple(zip(rows, factors(raw, "ssm_multipliers", 5), strict=True))
    width = specs.out_proj.weight.shape[0]
    return specs.replace(
        in_proj=scaled(specs.in_proj, runs, raw.number("ssm_in_multiplier")),
        out_proj=scaled(specs.out_proj, ((width, raw.number("ssm_out_multiplier")),)),
    )


def scaled_attention(raw: RawConfig, layer: AttentionConfig, specs: AttentionLayerParams) -> AttentionLayerParams:
    """The specs with `attention_in_multiplier`, `key_multiplier` and `attention_out_multiplier`."""
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    runs = ((queries, 1.0), (keys, raw.number("key_multiplier")), (keys, 1.0))
    width = specs.out.weight.shape[0]
    return specs.replace(
        qkv=scaled(specs.qkv, runs, raw.number("attention_in_multiplier")),
        out=scaled(specs.out, ((width, raw.number("attention_out_multiplier")),)),
    )


def scaled_mlp(raw: RawConfig, layer: MlpConfig, specs: MlpParams) -> MlpParams:
    """The specs with both `mlp_multipliers`: of the gate before its activation, and of the output."""
    gate, down = factors(raw, "mlp_multipliers", 2)
    width = specs.down.weight.shape[0]
    return specs.replace(
        gate_up=scaled(specs.gate_up, ((layer.hidden_dim, gate), (layer.hidden_dim, 1.0))),
        down=scaled(specs.down, ((width, down),)),
    )


def factors(raw: RawConfig, key: str, count: int) -> list[float]:
    """A list of `count` multipliers; all one where the field is absent."""
    listed = raw.get(key, [1.0] * count)
    right = isinstance(listed, list | tuple) and len(listed) == count
    if not right or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in listed):
        raise ConfigError(f"{key}={listed!r} in {raw.origin} is not a list of {count} numbers; correct the config.")
    return [float(x) for x in listed]


FAMILY = Family(
    name="falcon_h1",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    only={"sliding_window": (), "mamba_use_mlp": (True,)},
)
