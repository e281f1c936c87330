# SPDX-License-Identifier: Apache-2.0
"""The layer past a model's last, which it was trained with to guess the token after the next one.

Multi-token prediction as DeepSeek-V3 (2024) and Qwen3-Next have it: `fc` of a token's embedding and of the final row of
the token before, a norm over each, then one decoder layer, a norm and the model's own head.
"""

from dataclasses import dataclass
from typing import Any

from metrale_jax.core.config import AttentionConfig, LayerConfig, ModelConfig
from metrale_jax.layers.moe import MoeConfig
from metrale_jax.models.decoder_specs import DecoderNames, LayerSpecs, linear_specs, norm_spec
from metrale_jax.sharding import axes


@dataclass(frozen=True)
class NextLayer:
    """The layer's config, and the specs of its weights: those of the decoder `layer`, of the norms over embeddings
    (`embed_norm`), hidden rows and the output, and of `fc [D, 2D]`, whose first columns are the embedding's."""

    config: LayerConfig
    embed_norm: Any
    hidden_norm: Any
    fc: Any
    layer: Any
    final_norm: Any


def named_next_layer(
    config: ModelConfig, layer: LayerConfig, names: DecoderNames, specs: LayerSpecs, prefix: str = "mtp."
) -> NextLayer:
    """One whose tensors have names of their own: `mtp.fc`, `mtp.layers.0`, `mtp.norm` (Qwen3-Next)."""
    norms = {
        "embed_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "final_norm": "norm",
    }
    return _next_layer(config, layer, names, specs, (prefix, "fc", f"{prefix}layers.0.", norms))


def numbered_next_layer(config: ModelConfig, layer: LayerConfig, names: DecoderNames, specs: LayerSpecs) -> NextLayer:
    """One that is numbered on from the model's layers (DeepSeek-V3). What it holds of embeddings and head is the
    model's own again, and is left alone."""
    prefix = names.layer.format(len(config.layers))
    norms = {"embed_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
    return _next_layer(config, layer, names, specs, (prefix, "eh_proj", prefix, norms))


def last_attention(config: ModelConfig) -> LayerConfig:
    """A layer of the model's last attention, with its mixture of experts where any of its layers has one."""
    attention = next(
        mixer for layer in reversed(config.layers) for mixer in layer.mixers if isinstance(mixer, AttentionConfig)
    )
    ends = [layer.mlp for layer in config.layers]
    return LayerConfig((attention,), next((end for end in ends if isinstance(end, MoeConfig)), ends[-1]))


def _next_layer(config: ModelConfig, layer: LayerConfig, names: DecoderNames, specs: LayerSpecs, called) -> NextLayer:
    prefix, fc, inner, norms = called
    width = config.hidden_dim
    return NextLayer(
        config=layer,
        fc=linear_specs(prefix, fc, width, 2 * width, False, (axes.HIDDEN, axes.HIDDEN)),
        layer=specs(config, layer, names, inner),
        **{name: norm_spec(f"{prefix}{norm}.weight", width, names) for name, norm in norms.items()},
    )
