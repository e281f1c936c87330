# SPDX-License-Identifier: Apache-2.0
"""A tiny head computed one number after another in float64, entry by entry; written from the papers alone."""

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from metrale_jax.speculative.head_specs import head_specs
from metrale_jax.speculative.heads import default_capture, head_config

D, HEADS, KV, H, F, V, VD = 16, 4, 2, 4, 24, 40, 12
EPS = 1e-5
ROPE = RopeConfig((1.0, 0.1))
ATTENTION = AttentionConfig(HEADS, KV, H, H**-0.5, ROPE)
LAYER = LayerConfig((ATTENTION,), MlpConfig(F, "silu"))
TARGET = ModelConfig("llama", V, D, (LAYER,) * 6, 64, EPS, True)
KINDS = ("mtp", "eagle3")


def config_of(kind, draft_vocab_size=VD):
    """The config of a head for `TARGET`."""
    return head_config(kind, TARGET, LAYER, draft_vocab_size, default_capture(6) if kind == "eagle3" else ())


def params_of(config, seed=0):
    """Random params."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        if spec.integer:
            return jnp.asarray(np.sort(rng.choice(V, spec.shape[0], replace=False)), jnp.int32)
        return jnp.asarray(rng.normal(size=spec.shape) * 0.4 + (len(spec.shape) == 1), jnp.float32)

    return jax.tree.map(leaf, head_specs(config))


def random_rows(seed, *shape):
    """Float32 rows."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class PlainHead:
    """A head and the entries that it has had."""

    def __init__(self, kind, params, norm_before_residual=False):
        self.kind, self.norm_before_residual = kind, norm_before_residual
        self.params = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
        self.keys, self.values = [], []

    def step(self, feature, embed):
        """Feedback and output of the next entry."""
        p, position = self.params, len(self.keys)
        feature, embed = np.asarray(feature, np.float64), np.asarray(embed, np.float64)
        pair = np.concatenate([_norm(embed, p.embed_norm), _norm(feature, p.hidden_norm)])
        residual = p.fc.weight @ pair if self.kind == "mtp" else feature
        if self.norm_before_residual:
            residual = _norm(feature, p.hidden_norm)
        x = _norm(residual, p.layer.mixer_norm) if self.kind == "mtp" else pair
        q, k, v = np.split(p.layer.mixers[0].qkv.weight @ x, [HEADS * H, (HEADS + KV) * H])
        self.keys.append([_turned(part, position) for part in k.reshape(KV, H)])
        self.values.append(v.reshape(KV, H))
        heads = []
        for number, query in enumerate(q.reshape(HEADS, H)):
            of = number // (HEADS // KV)
            scores = np.asarray([_turned(query, position) @ key[of] for key in self.keys]) * H**-0.5
            weights = np.exp(scores - scores.max())
            shares = weights / weights.sum()
            heads.append(sum(share * value[of] for share, value in zip(shares, self.values, strict=True)))
        x = residual + p.layer.mixers[0].out.weight @ np.concatenate(heads)
        gate, up = np.split(p.layer.mlp.gate_up.weight @ _norm(x, p.layer.mlp_norm), 2)
        x = x + p.layer.mlp.down.weight @ (gate / (1 + np.exp(-gate)) * up)
        output = _norm(x, p.final_norm)
        return (output if self.kind == "mtp" else x), output


def _norm(x, weight):
    return x / np.sqrt((x * x).mean() + EPS) * weight


def _turned(x, position):
    angles = position * np.asarray(ROPE.inv_freq)
    first, second = x[: H // 2], x[H // 2 :]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    )
