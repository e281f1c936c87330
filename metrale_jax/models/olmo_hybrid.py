# SPDX-License-Identifier: Apache-2.0
"""OLMo Hybrid (OLMo Team 2026): Gated DeltaNet layers with norms before their parts, attention layers with norms after.

Its attention layers carry no positions where the config has no rope theta.
"""

from dataclasses import replace

from metrale_jax.core.config import AttentionConfig, LayerConfig, ModelConfig
from metrale_jax.layers.gated_delta import GatedDeltaConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs, dense_layer, mlp_specs, with_norms
from metrale_jax.models.delta_specs import ONLY, DeltaNames, delta_heads, every_nth, gated_delta_specs, kinds
from metrale_jax.models.family import Description, Family, attention_config, flat_rope, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.qwen3_next import dense
from metrale_jax.models.rope_config import rope_params
from metrale_jax.models.stack import LayerParams

# Whatever rms_norm_eps says.
OUTPUT_NORM_EPS = 1e-5
OPPOSITES = 2.0


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of an OLMo Hybrid checkpoint."""
    for key in ("linear_num_key_heads", "linear_num_value_heads", "num_key_value_heads"):
        raw.values.setdefault(key, raw.positive("num_attention_heads"))
    raw.values.setdefault("linear_key_head_dim", _key_dim(raw))
    raw.values.setdefault("linear_value_head_dim", 2 * raw.positive("linear_key_head_dim"))
    most = OPPOSITES if raw.flag("linear_allow_neg_eigval") else 1.0
    placed = rope_params(raw).get("rope_theta", raw.get("rope_theta")) is not None
    mixers = {
        "linear_attention": GatedDeltaConfig(delta_heads(raw), OUTPUT_NORM_EPS, most),
        "full_attention": attention_config(raw, flat_rope(raw) if placed else None),
    }
    layers = [LayerConfig((mixers[kind],), dense(raw)) for kind in kinds(raw, _layers(raw))]
    config = layered_config(raw, "olmo_hybrid", layers)
    bias = raw.flag("attention_bias")
    names = DecoderNames(
        mixer_norm="attention_layer_norm",
        mlp_norm="feedforward_layer_norm",
        qk_norm="full",
        qkv_bias=bias,
        out_bias=bias,
    )
    return Description(config, decoder_specs(config, names, _specs))


def _key_dim(raw: RawConfig) -> int:
    return int(0.75 * raw.positive("hidden_size") / raw.positive("linear_num_key_heads"))


def _layers(raw: RawConfig) -> list[str]:
    found = every_nth(raw, 4)
    return found if "full_attention" in found else [*found[:-1], "full_attention"]


def _specs(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
    (mixer,) = layer.mixers
    if isinstance(mixer, AttentionConfig):
        after = replace(
            names,
            mixer_norm="",
            mlp_norm="",
            mixer_post_norm="post_attention_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        )
        return dense_layer(config, layer, after, prefix)
    heads = mixer.heads
    keys, values = heads.key_heads * heads.key_dim, heads.heads * heads.value_dim
    parts = {"q": keys, "k": keys, "v": values, "g": values, "b": heads.heads, "a": heads.heads}
    delta = DeltaNames(
        inputs=tuple((f"linear_attn.{name}_proj", rows) for name, rows in parts.items()),
        taps=tuple(f"linear_attn.{name}_conv1d" for name in "qkv"),
        norm="o_norm",
        out="o_proj",
    )
    params = LayerParams(
        mixers=(gated_delta_specs(config.hidden_dim, mixer, delta, prefix),),
        mlp=mlp_specs(config.hidden_dim, layer.mlp.hidden_dim, names, prefix),
    )
    return with_norms(params, config, names, prefix)


FAMILY = Family(
    name="olmo_hybrid",
    describe=describe,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    only=ONLY,
)
