# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 (Zeng et al. 2025): dense layers, then mixtures by sigmoid within groups of experts, beside a shared one."""

from metrale_jax.core.config import LayerConfig, MlpConfig, ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.moe import MoeConfig, RouterConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    activation_of,
    attention_config,
    either,
    flat_rope,
    layered_config,
)
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import ExpertNames, mixture_layers
from metrale_jax.models.next_layer import NextLayer, numbered_next_layer
from pallas_kernels.activations import Activation

EXPERTS = ExpertNames(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts", float32_router=True)


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a GLM-4.5 checkpoint; its layers that draft tokens are left alone."""
    activation = activation_of(raw)
    width = raw.positive("moe_intermediate_size")
    mixture = MoeConfig(
        router_of(raw), width, Activation(activation), MlpConfig(width * raw.positive("n_shared_experts"), activation)
    )
    dense = MlpConfig(raw.positive("intermediate_size"), activation)
    attention = attention_config(raw, flat_rope(raw, partial=True))
    count, num_dense = raw.positive("num_hidden_layers"), _num_dense(raw)
    layers = [LayerConfig((attention,), mixture if index >= num_dense else dense) for index in range(count)]
    config = layered_config(raw, "glm4_moe", layers)
    specs = decoder_specs(config, names_of(raw), mixture_layers(EXPERTS))
    return Description(config, specs, drafting_layers(raw))


def names_of(raw: RawConfig) -> DecoderNames:
    """What the decoder's tensors are called."""
    qk_norm = "head" if raw.flag("use_qk_norm") else "none"
    return DecoderNames(qk_norm=qk_norm, qkv_bias=raw.flag("attention_bias"))


def next_layer(config: ModelConfig, raw: RawConfig) -> NextLayer | None:
    """The first of the layers past the last."""
    if not drafting_layers(raw):
        return None
    return numbered_next_layer(config, config.layers[-1], names_of(raw), mixture_layers(EXPERTS))


def router_of(raw: RawConfig) -> RouterConfig:
    """DeepSeek V3's way of routing, from its fields."""
    return RouterConfig(
        num_experts=raw.positive(either(raw, "num_local_experts", "n_routed_experts")),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="sigmoid",
        renormalised=raw.flag("norm_topk_prob"),
        scale=raw.number("routed_scaling_factor"),
        num_groups=raw.positive("n_group"),
        top_groups=raw.positive("topk_group"),
    )


def drafting_layers(raw: RawConfig) -> tuple[str, ...]:
    """Patterns of the tensors of layers past the last, which draft several tokens at once."""
    first = raw.positive("num_hidden_layers")
    extra = raw.get(either(raw, "num_mtp_layers", "num_nextn_predict_layers"), 0)
    return tuple(rf"model\.layers\.{first + index}\..*" for index in range(extra))


def _num_dense(raw: RawConfig) -> int:
    count, most = raw.get("first_k_dense_replace"), raw.positive("num_hidden_layers")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
        raise ConfigError(
            f"first_k_dense_replace={count!r} in {raw.origin} is not a number of layers from 0 to {most}; correct the "
            "config."
        )
    return count


FAMILY = Family(
    name="glm4_moe",
    describe=describe,
    defaults={
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    only={"scoring_func": ("sigmoid",)},
    next_layer=next_layer,
)
