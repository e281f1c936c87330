# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet in most layers, gated attention in the others, mixtures of experts."""

from dataclasses import replace

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig
from metrale_jax.layers.delta_rule import DeltaHeads
from metrale_jax.layers.gated_delta import GatedDeltaConfig
from metrale_jax.layers.moe import MoeConfig, RouterConfig
from metrale_jax.models import delta_specs
from metrale_jax.models.decoder_specs import (
    DecoderNames,
    LayerSpecs,
    attention_specs,
    decoder_specs,
    mlp_specs,
    one_plus,
    with_norms,
)
from metrale_jax.models.delta_specs import (
    ByKeyHead,
    DeltaNames,
    delta_heads,
    every_nth,
    gated_delta_specs,
    gated_queries,
    kinds,
)
from metrale_jax.models.family import Description, Family, activation_of, attention_config, flat_rope, layered_config
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import ExpertNames, moe_specs
from metrale_jax.models.next_layer import NextLayer, last_attention, named_next_layer
from metrale_jax.models.qwen3_moe import sparse_layers
from metrale_jax.models.stack import LayerParams
from pallas_kernels.activations import Activation

EXPERTS = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
ONLY = {**delta_specs.ONLY, "attn_output_gate": (True,), "scoring_func": ("softmax",)}
IGNORED = (r".*rotary_emb\.inv_freq", r"mtp\..*", r"model\.visual\..*")


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Qwen3-Next checkpoint."""
    config = layered_config(raw, "qwen3_next", hybrid_layers(raw, sparse_layers(raw)))
    return Description(config, decoder_specs(config, norms_from_one(raw), hybrid_specs(packed_names)))


def hybrid_layers(raw: RawConfig, sparse: list[bool]) -> list[LayerConfig]:
    """Layers of Gated DeltaNet or gated attention, of which the `sparse` ones end in a mixture of experts."""
    delta = GatedDeltaConfig(delta_heads(raw), raw.number("rms_norm_eps"))
    attention = attention_config(raw, flat_rope(raw, partial=True), gated=True)
    mixers = {"linear_attention": delta, "full_attention": attention}
    ends = {one: mixture(raw) if one else dense(raw) for one in set(sparse)}
    types = kinds(raw, every_nth(raw, raw.positive("full_attention_interval")))
    return [LayerConfig((mixers[kind],), ends[one]) for kind, one in zip(types, sparse, strict=True)]


def dense(raw: RawConfig) -> MlpConfig:
    """The feed-forward layer that is no mixture."""
    return MlpConfig(raw.positive("intermediate_size"), activation_of(raw))


def mixture(raw: RawConfig) -> MoeConfig:
    """The mixture of experts, one of them shared and weighed."""
    activation = activation_of(raw)
    router = RouterConfig(
        num_experts=raw.positive("num_experts"),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="softmax",
        renormalised=raw.flag("norm_topk_prob"),
    )
    shared = MlpConfig(raw.positive("shared_expert_intermediate_size"), activation)
    return MoeConfig(router, raw.positive("moe_intermediate_size"), Activation(activation), shared)


def next_layer(config: ModelConfig, raw: RawConfig) -> NextLayer | None:
    """The layer that drafts: one of gated attention, with a mixture where the model has any. Older files do not tell of
    it."""
    if not raw.get("mtp_num_hidden_layers", raw.get("num_nextn_predict_layers", 1)):
        return None
    return named_next_layer(config, last_attention(config), norms_from_one(raw), hybrid_specs(packed_names))


def norms_from_one(raw: RawConfig, **changes) -> DecoderNames:
    """Names of a decoder whose norms are stored as distances from one; `changes` are those of its tensors."""
    bias = raw.flag("attention_bias")
    return DecoderNames(qk_norm="head", qkv_bias=bias, out_bias=bias, norm_transform=one_plus, **changes)


def hybrid_specs(delta_names) -> LayerSpecs:
    """What makes the specs of hybrid layers; `delta_names(heads)` are those of Gated DeltaNet's tensors."""

    def specs(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
        (mixer,), width = layer.mixers, config.hidden_dim
        if isinstance(mixer, AttentionConfig):
            mixed = gated_attention_specs(width, mixer, names, prefix)
        else:
            mixed = gated_delta_specs(width, mixer, delta_names(mixer.heads), prefix)
        if isinstance(layer.mlp, MoeConfig):
            end = moe_specs(width, layer.mlp, EXPERTS, prefix)
        else:
            end = mlp_specs(width, layer.mlp.hidden_dim, names, prefix)
        return with_norms(LayerParams((mixed,), end), config, names, prefix)

    return specs


def gated_attention_specs(width: int, layer: AttentionConfig, names: DecoderNames, prefix: str):
    """Specs of attention whose query projection holds each head's gate too."""
    params = attention_specs(width, layer, names, prefix)
    changed = (
        spec if isinstance(spec, tuple) else gated_queries(spec, layer.num_heads, layer.head_dim)
        for spec in (params.qkv.weight, params.qkv.bias)
    )
    weight, bias = changed
    return replace(params, qkv=replace(params.qkv, weight=weight, bias=bias))


def packed_names(heads: DeltaHeads) -> DeltaNames:
    """Gated DeltaNet's inputs in two tensors, packed by key head: queries, keys, values, gates; strengths, decays."""
    group = heads.heads // heads.key_heads
    key, value = heads.key_dim, group * heads.value_dim
    packs = (((0, key), (1, key), (2, value), (3, value)), ((4, group), (5, group)))
    rows = [heads.key_heads * sum(count for _, count in pack) for pack in packs]
    return DeltaNames(
        inputs=(("linear_attn.in_proj_qkvz", rows[0]), ("linear_attn.in_proj_ba", rows[1])),
        order=ByKeyHead(heads.key_heads, packs),
    )


FAMILY = Family(
    name="qwen3_next",
    describe=describe,
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    ignored=IGNORED,
    only=ONLY,
    next_layer=next_layer,
)
