# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of one kind each, Mamba-2, attention without positions, feed-forward
without a gate, or a mixture of such."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig
from metrale_jax.core.errors import ConfigError, Unsupported
from metrale_jax.layers.moe import MoeConfig
from metrale_jax.models.decoder_specs import DecoderNames, attention_specs, decoder_specs, mlp_specs, with_norms
from metrale_jax.models.family import Description, Family, activation_of, attention_config, layered_config
from metrale_jax.models.glm4_moe import router_of
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.mamba2_specs import Mamba2Names, mamba2_config, mamba2_specs, silu_only
from metrale_jax.models.moe_specs import ExpertNames, moe_specs
from metrale_jax.models.stack import LayerParams
from pallas_kernels.activations import Activation

FIELDS = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_dim": "ssm_state_size",
    "conv_width": "conv_kernel",
}
NAMES = DecoderNames(
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_out="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    mixer_norm="norm",
    mlp_norm="",
    embed="backbone.embeddings.weight",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f.weight",
)
EXPERTS = ExpertNames(
    router="mixer.gate",
    up=("mixer.experts.{}.up_proj",),
    down="mixer.experts.{}.down_proj",
    correction="mixer.gate.e_score_correction_bias",
    float32_router=True,
)
LETTERS = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"})
SPELLINGS = MappingProxyType({"linear_attention": "mamba", "full_attention": "attention"})


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Nemotron-H checkpoint."""
    makers: Mapping[str, Callable[[RawConfig], LayerConfig]] = {
        "mamba": _mamba,
        "attention": _attention,
        "mlp": _mlp,
        "moe": _moe,
    }
    kinds = layer_kinds(raw)
    missing = sorted(set(kinds) - set(makers))
    if missing:
        raise Unsupported(f"layers of {missing} in {raw.origin} are not supported; supported are {sorted(makers)}.")
    made = {kind: makers[kind](raw) for kind in dict.fromkeys(kinds)}
    config = layered_config(
        raw, "nemotron_h", [made[kind] for kind in kinds], norm_eps=raw.number("layer_norm_epsilon")
    )
    bias = raw.flag("use_bias")
    parts = Mamba2Names("mixer.", in_bias=bias, out_bias=bias, conv_bias=raw.flag("use_conv_bias"))

    def specs(config, layer, names, prefix):
        if not layer.mixers:
            params = LayerParams((), feed_forward_specs(config.hidden_dim, layer.mlp, names, prefix))
            return with_norms(params, config, replace(names, mixer_norm="", mlp_norm="norm"), prefix)
        (mixer,) = layer.mixers
        if isinstance(mixer, AttentionConfig):
            mixers = (attention_specs(config.hidden_dim, mixer, names, prefix),)
        else:
            mixers = (mamba2_specs(config.hidden_dim, mixer, parts, prefix),)
        return with_norms(LayerParams(mixers), config, names, prefix)

    return Description(config, decoder_specs(config, replace(NAMES, mlp_bias=raw.flag("mlp_bias")), specs))


def layer_kinds(raw: RawConfig) -> list[str]:
    """Each layer's "mamba", "attention", "mlp" or "moe", from a list under either name or from the older pattern."""
    listed = raw.get("layers_block_type") or raw.get("layer_types")
    if listed is None:
        pattern = raw.get("hybrid_override_pattern")
        if not pattern or not set(pattern) <= set(LETTERS):
            raise ConfigError(
                f"hybrid_override_pattern={pattern!r} in {raw.origin} must have one of {sorted(LETTERS)} for each "
                "layer, or layers_block_type must list them; correct the config."
            )
        return [LETTERS[letter] for letter in pattern]
    return [SPELLINGS.get(kind, kind) for kind in listed]


def feed_forward_specs(width: int, layer: MlpConfig | MoeConfig, names: DecoderNames, prefix: str):
    """Specs of a feed-forward layer, or of a mixture and its shared expert."""
    if isinstance(layer, MlpConfig):
        return mlp_specs(width, layer.hidden_dim, names, prefix, gated=False)
    shared = replace(names, gate_up=("mixer.shared_experts.up_proj",), down="mixer.shared_experts.down_proj")
    specs = moe_specs(width, layer, EXPERTS, prefix)
    return specs.replace(shared=mlp_specs(width, layer.shared.hidden_dim, shared, prefix, gated=False))


def _mamba(raw: RawConfig) -> LayerConfig:
    silu_only(raw, "mamba_hidden_act")
    inner_dim = raw.positive("mamba_num_heads") * raw.positive("mamba_head_dim")
    # As transformers runs it: time_step_limit is not looked at, and steps have a least size.
    return LayerConfig((mamba2_config(raw, FIELDS, inner_dim, min_step=raw.number("time_step_min")),), None)


def _attention(raw: RawConfig) -> LayerConfig:
    return LayerConfig((attention_config(raw, None),), None)


def _mlp(raw: RawConfig) -> LayerConfig:
    return LayerConfig((), _plain(raw, "intermediate_size"))


def _moe(raw: RawConfig) -> LayerConfig:
    if raw.get("moe_latent_size") is not None:
        raise Unsupported(
            f"moe_latent_size={raw.get('moe_latent_size')} in {raw.origin}: experts of a width of their own are not "
            "supported; null is."
        )
    activation = Activation(activation_of(raw, "mlp_hidden_act"), gated=False)
    shared = _plain(raw, "moe_shared_expert_intermediate_size")
    return LayerConfig((), MoeConfig(router_of(raw), raw.positive("moe_intermediate_size"), activation, shared))


def _plain(raw: RawConfig, key: str) -> MlpConfig:
    return MlpConfig(raw.positive(key), activation_of(raw, "mlp_hidden_act"), gated=False)


FAMILY = Family(
    name="nemotron_h",
    describe=describe,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    ignored=(r"mtp\..*",),
    # Attention has no biases and no window in transformers either, whatever its config says.
    only={"attention_bias": (False,), "sliding_window": ()},
)
