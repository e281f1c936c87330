# SPDX-License-Identifier: Apache-2.0
"""Mixtral (Jiang et al. 2024): Mistral's block with a mixture of experts in every layer."""

from metrale_jax.core.config import LayerConfig
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
    window_of,
)
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import ExpertNames, mixture_layers
from pallas_kernels.activations import Activation

THETA = 1_000_000.0
# w1 is the gate, w3 goes up, w2 down.
BLOCK_SPARSE = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a Mixtral checkpoint."""
    attention = attention_config(raw, flat_rope(raw, THETA), window=window_of(raw))
    router = RouterConfig(
        num_experts=raw.positive(either(raw, "num_experts", "num_local_experts")),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="softmax",
        renormalised=True,
    )
    activation = Activation(activation_of(raw))
    mixture = MoeConfig(router, raw.positive("intermediate_size"), activation)
    layers = [LayerConfig((attention,), mixture)] * raw.positive("num_hidden_layers")
    config = layered_config(raw, "mixtral", layers)
    return Description(config, decoder_specs(config, DecoderNames(), mixture_layers(BLOCK_SPARSE)))


FAMILY = Family(
    name="mixtral",
    describe=describe,
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    only={"norm_topk_prob": (True,)},
)
