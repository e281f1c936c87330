# SPDX-License-Identifier: Apache-2.0
"""Draft heads of random weights for stored models, and what they must draft, computed from whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, RopeConfig
from metrale_jax.speculative.head_specs import PLAIN, head_specs
from metrale_jax.speculative.heads import head_config

ROPE = RopeConfig(tuple(float(x) for x in 100.0 ** -(np.arange(4) / 4)))
LAYER = LayerConfig((AttentionConfig(4, 2, 8, 8**-0.5, ROPE),), MlpConfig(24, "silu"))


def head_of(kind, target, draft_vocab_size=0, capture=(), layer=LAYER):
    """The config of a head for `target`."""
    return head_config(kind, target, layer, draft_vocab_size, capture)


def random_params(config, seed=0, scale=0.4, names=PLAIN):
    """Weights of a head that draws on all of its inputs."""
    draw = np.random.default_rng(seed)

    def leaf(spec):
        if spec.integer:
            return jnp.asarray(np.sort(draw.choice(config.vocab_size, spec.shape[0], replace=False)), jnp.int32)
        return jnp.asarray(draw.normal(size=spec.shape) * scale + (len(spec.shape) == 1), jnp.float32)

    return jax.tree.map(leaf, head_specs(config, names))
