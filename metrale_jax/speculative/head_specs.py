# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of draft heads under the names that published checkpoints use.

MTP: `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.layers.0.*`, `mtp.norm` (Qwen3-Next).
EAGLE-3: `fc`, `midlayer.*`, `norm`, `lm_head` and `d2t`, the distance of each draft id from the target's (SafeAILab).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from metrale_jax.core.config import ModelConfig
from metrale_jax.core.specs import ParamSpec, Source
from metrale_jax.models.decoder_specs import (
    DecoderNames,
    LayerSpecs,
    attention_specs,
    dense_layer,
    linear_specs,
    mlp_specs,
    norm_spec,
)
from metrale_jax.models.stack import LayerParams
from metrale_jax.sharding import axes
from metrale_jax.speculative.heads import EagleConfig, HeadParams, MtpConfig, attention_width

HEAD = "lm_head.weight"
IDS = "d2t"
MTP_LAYER = "mtp.layers.0."
EAGLE_LAYER = "midlayer."


PLAIN = DecoderNames()


def head_specs(config, names: DecoderNames = PLAIN, layer: LayerSpecs = dense_layer) -> HeadParams:
    """A tree of specs shaped like the head's params. `names` tell which norms and biases its layer has, and `layer`
    makes the specs of an MTP head's; a family passes its own to both."""
    return _SPECS[type(config)](config, names, layer)


def _mtp_specs(config: MtpConfig, names: DecoderNames, layer: LayerSpecs) -> HeadParams:
    width = config.hidden_dim
    return HeadParams(
        embed_norm=norm_spec("mtp.pre_fc_norm_embedding.weight", width, names),
        hidden_norm=norm_spec("mtp.pre_fc_norm_hidden.weight", width, names),
        fc=linear_specs("mtp.", "fc", width, 2 * width, False, (axes.HIDDEN, axes.HIDDEN)),
        layer=layer(_as_decoder(config), config.layer, names, MTP_LAYER),
        final_norm=norm_spec("mtp.norm.weight", width, names),
        **_vocabulary(config),
    )


def _eagle_specs(config: EagleConfig, names: DecoderNames, layer: LayerSpecs) -> HeadParams:
    width, (attention,) = config.hidden_dim, config.layer.mixers
    mixer = attention_specs(attention_width(config), attention, names, EAGLE_LAYER)
    out = attention_specs(width, attention, names, EAGLE_LAYER).out
    return HeadParams(
        embed_norm=norm_spec(f"{EAGLE_LAYER}input_layernorm.weight", width, names),
        hidden_norm=norm_spec(f"{EAGLE_LAYER}hidden_norm.weight", width, names),
        fc=linear_specs("", "fc", width, len(config.capture) * width, False, (axes.HIDDEN, axes.HIDDEN)),
        layer=LayerParams(
            mixers=(mixer.replace(out=out),),
            mlp=mlp_specs(width, config.layer.mlp.hidden_dim, names, EAGLE_LAYER),
            mlp_norm=norm_spec(f"{EAGLE_LAYER}post_attention_layernorm.weight", width, names),
        ),
        final_norm=norm_spec("norm.weight", width, names),
        **_vocabulary(config),
    )


def _vocabulary(config) -> dict:
    size = config.draft_vocab_size
    if not size:
        return {}
    shape = (size, config.hidden_dim)
    head = ParamSpec(shape, (axes.VOCAB, axes.HIDDEN), (Source(HEAD, shape),))
    if size == config.vocab_size:
        return {"head": head}
    ids = ParamSpec((size,), (axes.VOCAB,), (Source(IDS, (size,), "int64"),), ids_of_distances, integer=True)
    return {"head": head, "token_ids": ids}


def ids_of_distances(distances: np.ndarray) -> np.ndarray:
    """Token ids from each one's distance from its own row."""
    return (distances + np.arange(len(distances))).astype(np.int32)


def distances_of_ids(ids: np.ndarray) -> np.ndarray:
    """What `ids_of_distances` undoes."""
    return ids.astype(np.int64) - np.arange(len(ids))


def _as_decoder(config: MtpConfig) -> ModelConfig:
    return ModelConfig(
        family="",
        vocab_size=config.vocab_size,
        hidden_dim=config.hidden_dim,
        layers=(config.layer,),
        max_context_tokens=0,
        norm_eps=config.norm_eps,
        tie_embeddings=True,
    )


_SPECS: Mapping[type, Callable] = MappingProxyType({MtpConfig: _mtp_specs, EagleConfig: _eagle_specs})
