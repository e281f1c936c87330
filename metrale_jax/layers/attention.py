# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention (Ainslie et al. 2023) over a paged past."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import AttentionConfig
from metrale_jax.layers.linear import linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.rope import apply_rope
from metrale_jax.state import paged
from metrale_jax.state.paged import PagedKv
from pallas_kernels.paged_attention.op import AttentionParams, decode_attention, prefill_attention


@dataclass(frozen=True)
class Placement:
    """Static facts of where a layer runs: its group of the pool, the norm's epsilon, the platform lowered for, and the
    implementation of paged attention.

    `axis` names the mesh axis whose devices share the layer's heads and channels, `norm_axis` the same where one norm
    is over all heads; both are empty where one device has all.
    """

    group: int
    norm_eps: float
    platform: str
    attention: str = "auto"
    axis: str = ""
    norm_axis: str = ""


@struct.dataclass
class AttentionLayerParams:
    """`qkv [(N + 2K)H, D]`: the query heads' rows, then keys', then values'. `out [D, N H]`.

    `q_norm` and `k_norm` are `[H]` for a norm over each head, the full width for one over all heads, or `()`.
    """

    qkv: Any
    out: Any
    q_norm: Any = ()
    k_norm: Any = ()


def attention(
    x: Float[Array, "T D"],
    params: AttentionLayerParams,
    config: AttentionConfig,
    tables: tuple,
    batch: TokenBatch,
    kv: PagedKv,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], PagedKv]:
    """The layer's output, and its group's storage with the step's keys and values appended.

    `tables` are the rotary cosines and sines; `layer` is the layer's index in its group of the pool.
    """
    tokens, heads, kv_heads, width = x.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
    with jax.named_scope("qkv"):
        packed = linear(x, params.qkv)
        q, k, v = jnp.split(packed, [heads * width, (heads + kv_heads) * width], axis=-1)
        q = _head_norm(q, params.q_norm, heads, place)
        k = _head_norm(k, params.k_norm, kv_heads, place)
        q, k = apply_rope(q, *tables), apply_rope(k, *tables)
    with jax.named_scope("append"):
        v = v.reshape(tokens, kv_heads, width)
        kv = paged.append(kv, layer, batch.slots[place.group], k, v, place.platform)
    with jax.named_scope("attend"):
        mixed = _attend_segments(q, config, batch, kv, layer, place)
    with jax.named_scope("out"):
        return linear(mixed.reshape(tokens, heads * width), params.out, place.axis), kv


def _head_norm(x, weight, heads, place):
    eps = place.norm_eps
    over_heads = not isinstance(weight, tuple) and weight.shape[0] == x.shape[-1]
    if over_heads:
        x = rms_norm(x, weight, eps, place.norm_axis)
    x = x.reshape(x.shape[0], heads, -1)
    return x if over_heads else rms_norm(x, weight, eps)


def _attend_segments(q, config, batch, kv, layer, place):
    facts = AttentionParams(config.scale, config.window, config.softcap)
    outputs, start = [], 0
    for segment in batch.segments:
        part = q[start : start + segment.num_tokens]
        rows = segment.rows[place.group]
        if segment.uniform:
            part = part.reshape(-1, rows.max_query_len, *part.shape[1:])
            out = decode_attention(part, kv, layer, rows, facts, place.platform, impl=place.attention)
            out = out.reshape(segment.num_tokens, *out.shape[2:])
        else:
            out = prefill_attention(part, kv, layer, rows, facts, place.platform, impl=place.attention)
        outputs.append(out)
        start += segment.num_tokens
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
