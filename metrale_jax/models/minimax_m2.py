# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2 (MiniMax 2025): a mixture of experts by sigmoid in every layer, norms over all query and all key heads."""

from dataclasses import replace

from metrale_jax.core.config import LayerConfig, RopeConfig
from metrale_jax.layers.moe import MoeConfig, RouterConfig
from metrale_jax.models.decoder_specs import DecoderNames, decoder_specs
from metrale_jax.models.family import (
    Description,
    Family,
    activation_of,
    attention_config,
    either,
    head_dim_of,
    layered_config,
)
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.mixtral import BLOCK_SPARSE
from metrale_jax.models.moe_specs import mixture_layers
from metrale_jax.models.rope_config import parse_rope, rope_params
from pallas_kernels.activations import Activation

THETA = 5_000_000.0
EXPERTS = replace(BLOCK_SPARSE, correction="block_sparse_moe.e_score_correction_bias")


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a MiniMax M2 checkpoint."""
    router = RouterConfig(
        num_experts=raw.positive(either(raw, "num_experts", "num_local_experts")),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="sigmoid",
        renormalised=True,
    )
    activation = Activation(activation_of(raw))
    mixture = MoeConfig(router, raw.positive("intermediate_size"), activation)
    layer = LayerConfig((attention_config(raw, _rope(raw)),), mixture)
    config = layered_config(raw, "minimax_m2", [layer] * raw.positive("num_hidden_layers"))
    return Description(config, decoder_specs(config, DecoderNames(qk_norm="full"), mixture_layers(EXPERTS)))


def _rope(raw: RawConfig) -> RopeConfig:
    """Published files say `rotary_dim` where transformers says `partial_rotary_factor`."""
    params, width = dict(rope_params(raw)), head_dim_of(raw)
    if raw.get("rotary_dim") is not None and raw.get("partial_rotary_factor") is None:
        params.setdefault("partial_rotary_factor", raw.positive("rotary_dim") / width)
    return parse_rope(raw, params, width, THETA, partial=True)


FAMILY = Family(
    name="minimax_m2",
    describe=describe,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    only={
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
        "norm_topk_prob": (True,),
    },
)
