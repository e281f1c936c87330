# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (OpenAI 2025): attention sinks, windows in every other layer, biased experts with a clamped activation."""

from dataclasses import replace

import numpy as np

from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.core.specs import ParamSpec, Source
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.moe import MoeConfig, MoeParams, RouterConfig
from metrale_jax.models.decoder_specs import DecoderNames, LayerSpecs, attention_specs, decoder_specs, with_norms
from metrale_jax.models.family import (
    Description,
    Family,
    attention_config,
    either,
    head_dim_of,
    layer_types,
    layered_config,
    window_of,
)
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.moe_specs import router_specs
from metrale_jax.models.mxfp4 import Mxfp4Rows, mxfp4_sources
from metrale_jax.models.rope_config import parse_rope, rope_params
from metrale_jax.models.stack import LayerParams
from metrale_jax.sharding import axes
from pallas_kernels.activations import Activation

THETA = 150_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(raw: RawConfig) -> Description:
    """Config and weight specs of a gpt-oss checkpoint, its experts in floating point or in MXFP4."""
    count = raw.positive("num_hidden_layers")
    kinds = layer_types(raw, ["full_attention" if index % 2 else "sliding_attention" for index in range(count)])
    windows = {"sliding_attention": window_of(raw), "full_attention": 0}
    rope = parse_rope(raw, rope_params(raw) or YARN, head_dim_of(raw), THETA)
    router = RouterConfig(
        num_experts=raw.positive(either(raw, "num_experts", "num_local_experts")),
        top_k=raw.positive("num_experts_per_tok"),
        scoring="softmax",
        renormalised=True,
    )
    activation = Activation("silu", limit=raw.number("swiglu_limit"), slope=raw.number("swiglu_alpha"), shift=1.0)
    mixture = MoeConfig(router, raw.positive("intermediate_size"), activation)
    layers = [LayerConfig((attention_config(raw, rope, window=windows[kind]),), mixture) for kind in kinds]
    config = layered_config(raw, "gpt_oss", layers)
    bias = raw.flag("attention_bias")
    names = DecoderNames(qkv_bias=bias, out_bias=bias)
    return Description(config, decoder_specs(config, names, _layers(bool(raw.table("quantization_config")))))


def _layers(mxfp4: bool) -> LayerSpecs:
    make = _mxfp4_experts if mxfp4 else _plain_experts

    def specs(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
        (attention,) = layer.mixers
        sinks_source = Source(f"{prefix}self_attn.sinks", (attention.num_heads,))
        sinks = ParamSpec((attention.num_heads,), (axes.HEADS,), (sinks_source,), keep_float32=True)
        mixer = attention_specs(config.hidden_dim, attention, names, prefix).replace(sinks=sinks)
        width, own = config.hidden_dim, layer.mlp
        mlp = MoeParams(
            router=router_specs(width, own, "mlp.router", prefix, bias=True),
            gate_up=make(f"{prefix}mlp.experts.gate_up_proj", own, (2 * own.hidden_dim, width), gated=True),
            down=make(f"{prefix}mlp.experts.down_proj", own, (width, own.hidden_dim), gated=False),
        )
        return with_norms(LayerParams((mixer,), mlp), config, names, prefix)

    return specs


def halves(rows: np.ndarray) -> np.ndarray:
    """Rows of axis 1 that alternate between gate and up, those of the gate first."""
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def turned(array: np.ndarray) -> np.ndarray:
    """`[E, D, F]` as `[E, F, D]`."""
    return np.ascontiguousarray(array.swapaxes(1, 2))


def turned_halves(array: np.ndarray) -> np.ndarray:
    """`[E, D, 2F]`, gate and up in turn, as `[E, 2F, D]`, the gate first."""
    return halves(array.swapaxes(1, 2))


def _plain_experts(name: str, config: MoeConfig, shape: tuple[int, int], gated: bool) -> Linear:
    count, (rows, columns) = config.router.num_experts, shape
    source = Source(name, (count, columns, rows))
    weight = ParamSpec((count, rows, columns), _AXES, (source,), turned_halves if gated else turned)
    return Linear(weight, _bias(name, count, rows, gated))


def _mxfp4_experts(name: str, config: MoeConfig, shape: tuple[int, int], gated: bool) -> Linear:
    count, (rows, columns) = config.router.num_experts, shape
    transform = Mxfp4Rows(name, halves if gated else None)
    weight = ParamSpec((count, rows, columns), _AXES, mxfp4_sources(name, (count, rows, columns)), transform)
    return Linear(weight, _bias(name, count, rows, gated))


_AXES = (axes.EXPERTS, axes.FFN, axes.HIDDEN)


def _bias(name: str, count: int, rows: int, gated: bool) -> ParamSpec:
    spec = ParamSpec((count, rows), _AXES[:2], (Source(f"{name}_bias", (count, rows)),))
    return replace(spec, transform=halves) if gated else spec


FAMILY = Family(
    name="gpt_oss",
    describe=describe,
    quantised=("mxfp4",),
    only={"norm_topk_prob": (True,), "hidden_act": ("silu",)},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
