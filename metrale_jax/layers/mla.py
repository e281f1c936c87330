# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-AI 2024) over latents as they are, for layers that carry no positions.

All heads' keys and values are linear in one latent a token, which alone is kept. The projections that would widen it
move to the other side of the two products: queries are taken into the latents' space, and what is mixed there is
widened once a query instead of once a key.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.layers.attention import attend_segments
from metrale_jax.layers.linear import Linear, linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.state import paged
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.paged import PagedKv, PagedKvSpec
from pallas_kernels.paged_attention.op import AttentionParams

# Of the norm over latents, whatever the model's other norms have.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MlaConfig:
    """Static facts of one layer: latents of `rank`, and of each head's key `own_dim` that come of the latent and
    `shared_dim` that all heads have alike; values of `v_dim`."""

    num_heads: int
    rank: int
    own_dim: int
    shared_dim: int
    v_dim: int
    scale: float
    window: int = 0

    @property
    def head_dim(self) -> int:
        """What is kept of a token, and looked at by each head."""
        return self.rank + self.shared_dim


@struct.dataclass
class MlaParams:
    """`inputs [N (H + h) + r + h, D]`: rows of each head's queries, then of the latent and of the key that heads share.
    `norm [r]`, float32. `keys [N, H, r]` and `values [N, Hv, r]` widen a latent. `out [D, N Hv]`."""

    inputs: Linear
    norm: Any
    keys: Any
    values: Any
    out: Linear


def mla_state(config: MlaConfig, formats: StateFormats) -> PagedKvSpec:
    """What the layer keeps of a sequence: one head of latents beside shared keys, and no values of their own."""
    return PagedKvSpec(1, config.head_dim, 0, config.window, formats.keys)


def mla(
    x: Float[Array, "T D"],
    params: MlaParams,
    config: MlaConfig,
    tables: tuple,
    batch: TokenBatch,
    kv: PagedKv,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], PagedKv]:
    """The layer's output, and its group's storage with the step's latents appended."""
    tokens, heads, width = x.shape[0], config.num_heads, config.own_dim + config.shared_dim
    with jax.named_scope("inputs"):
        q, latent, shared = jnp.split(linear(x, params.inputs), [heads * width, heads * width + config.rank], axis=-1)
        own, q_shared = jnp.split(q.reshape(tokens, heads, width), [config.own_dim], axis=-1)
        q = jnp.concatenate([_einsum("tnh,nhr->tnr", own, params.keys), q_shared], axis=-1)
        latent = rms_norm(latent, params.norm, LATENT_NORM_EPS)
    with jax.named_scope("append"):
        keys = jnp.concatenate([latent, shared], axis=-1)[:, None]
        kv = paged.append(kv, layer, batch.slots[place.group], keys, keys[..., :0], place.platform)
    with jax.named_scope("attend"):
        facts = AttentionParams(config.scale, config.window, latent=config.rank)
        mixed = attend_segments(q, facts, (), batch, kv, layer, place)
    with jax.named_scope("out"):
        mixed = _einsum("tnr,nvr->tnv", mixed, params.values)
        return linear(mixed.reshape(tokens, -1), params.out), kv


def _einsum(product, left, right):
    return jnp.einsum(product, left, right, preferred_element_type=jnp.float32).astype(left.dtype)
