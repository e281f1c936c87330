# SPDX-License-Identifier: Apache-2.0
"""Where the training of a head begins: at what the target's own last layer, norm and head already know."""

from dataclasses import replace

import jax
import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from metrale_jax.core.specs import ParamSpec
from metrale_jax.layers.attention import AttentionLayerParams
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.speculative.head_specs import head_specs
from metrale_jax.speculative.heads import HEADS, HeadParams, attention_width

HEAD_DIM = 64
THETA = 10_000.0
SPREAD = 0.02


def head_layer(target: ModelConfig) -> LayerConfig:
    """The layer of a head for `target`: attention over all of the past and a gated feed-forward layer, each as the
    target's last of that kind is, or of the usual size where it has none."""
    mixers = [mixer for layer in target.layers for mixer in layer.mixers if isinstance(mixer, AttentionConfig)]
    ends = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MlpConfig) and layer.mlp.gated]
    if mixers:
        attention = replace(mixers[-1], window=0, softcap=0.0, gated=False)
    else:
        heads = max(1, target.hidden_dim // HEAD_DIM)
        attention = AttentionConfig(heads, heads, HEAD_DIM, HEAD_DIM**-0.5, None)
    if attention.rope is None:
        steps = np.arange(0, attention.head_dim, 2) / attention.head_dim
        attention = replace(attention, rope=RopeConfig(tuple(float(x) for x in THETA**-steps)))
    else:
        attention = replace(attention, rope=RopeConfig(attention.rope.inv_freq, attention.rope.attention_factor))
    usual = MlpConfig(-(-8 * target.hidden_dim // (3 * HEAD_DIM)) * HEAD_DIM, "silu")
    return LayerConfig((attention,), ends[-1] if ends else usual)


def initial_head(config, target: ModelConfig, params: DecoderParams, ids: np.ndarray, seed: int) -> HeadParams:
    """The params of a head for `target` before training; `ids` is its draft vocabulary. Float32.

    A head that reads the residual stream begins with a layer of the target's, which is made for that; one that reads
    final rows with a random one.
    """
    specs = head_specs(config)
    leaves, tree = jax.tree.flatten(specs)
    draw = np.random.default_rng([seed, 0])
    head = jax.tree.unflatten(tree, [_random(spec, draw) for spec in leaves])
    width = config.hidden_dim
    rows = np.asarray(params.embed if isinstance(params.head, tuple) else params.head, np.float32)
    passing = np.zeros((width, config_inputs(config) * width), np.float32)
    passing[:, -width:] = np.eye(width)
    return head.replace(
        fc=Linear(head.fc.weight + passing),
        layer=_layer(config, target, params, head.layer) if config.capture else head.layer,
        final_norm=np.asarray(params.final_norm, np.float32),
        **({} if isinstance(head.head, tuple) else {"head": rows[ids]}),
        **({} if isinstance(head.token_ids, tuple) else {"token_ids": ids}),
    )


def config_inputs(config) -> int:
    """How many rows as wide as the model go into the head's `fc`."""
    return HEADS[type(config)].fc_factor


def _random(spec: ParamSpec, draw: np.random.Generator) -> np.ndarray:
    if len(spec.shape) == 1:
        return np.zeros(spec.shape, np.int32) if spec.integer else np.ones(spec.shape, np.float32)
    return (draw.standard_normal(spec.shape) * SPREAD).astype(np.float32)


def _layer(config, target: ModelConfig, params: DecoderParams, layer):
    """`layer` with the weights of the target's last layers of the same shapes."""
    (attention,) = config.layer.mixers
    width = config.hidden_dim
    for kind, weights in zip(target.layers, params.layers, strict=True):
        for mixer, own in zip(kind.mixers, weights.mixers, strict=True):
            if _serves(mixer, own, attention):
                qkv = np.asarray(layer.mixers[0].qkv.weight).copy()
                # An EAGLE-3 head reads the embedding beside the feature: the target's weights are for the latter.
                qkv[:, attention_width(config) - width :] = np.asarray(own.qkv.weight, np.float32)
                out = Linear(np.asarray(own.out.weight, np.float32))
                layer = layer.replace(mixers=(AttentionLayerParams(Linear(qkv), out),))
        if kind.mlp == config.layer.mlp and _plain(weights.mlp, layer.mlp):
            layer = layer.replace(
                mlp=MlpParams(
                    *(Linear(np.asarray(one.weight, np.float32)) for one in (weights.mlp.gate_up, weights.mlp.down))
                )
            )
            layer = layer.replace(mlp_norm=_norm(weights.mlp_norm, layer.mlp_norm))
    return layer


def _serves(mixer, own, attention: AttentionConfig) -> bool:
    same = isinstance(mixer, AttentionConfig) and not mixer.gated
    facts = ("num_heads", "num_kv_heads", "head_dim")
    if not same or any(getattr(mixer, name) != getattr(attention, name) for name in facts):
        return False
    extras = (own.q_norm, own.k_norm, own.sinks, own.qkv.bias, own.out.bias)
    return all(isinstance(extra, tuple) for extra in extras)


def _plain(own, layer: MlpParams) -> bool:
    return isinstance(own, MlpParams) and own.gate_up.weight.shape == layer.gate_up.weight.shape


def _norm(own, otherwise):
    return otherwise if isinstance(own, tuple) else np.asarray(own, np.float32)
