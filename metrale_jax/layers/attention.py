# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention (Ainslie et al. 2023) over a paged past."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import AttentionConfig
from metrale_jax.layers.linear import linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.rope import apply_rope
from metrale_jax.state import paged
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.paged import PagedKv, PagedKvSpec
from pallas_kernels.paged_attention.op import AttentionParams, decode_attention, prefill_attention


def attention_state(config: AttentionConfig, formats: StateFormats) -> PagedKvSpec:
    """What the layer keeps of a sequence."""
    return PagedKvSpec(config.num_kv_heads, config.head_dim, config.head_dim, config.window, formats.keys)


@struct.dataclass
class AttentionLayerParams:
    """`qkv [(N + 2K)H, D]`: the query heads' rows, then keys', then values', then of a gated layer as many rows as the
    queries'. `out [D, N H]`.

    `q_norm` and `k_norm` are `[H]` for a norm over each head, the full width for one over all heads, or `()`. `sinks
    [N]` are logits without a value in each head's softmax, or `()`.
    """

    qkv: Any
    out: Any
    q_norm: Any = ()
    k_norm: Any = ()
    sinks: Any = ()


def attention(
    x: Float[Array, "T A"],
    params: AttentionLayerParams,
    config: AttentionConfig,
    tables: tuple,
    batch: TokenBatch,
    kv: PagedKv,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], PagedKv]:
    """The layer's output, and its group's storage with the step's keys and values appended.

    `x` is as wide as `params.qkv`, which in a decoder's layers is the model's width. `tables` are the rotary cosines
    and sines, or `()`; `layer` is the layer's index in its group of the pool.
    """
    tokens, heads, kv_heads, width = x.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
    with jax.named_scope("qkv"):
        packed = linear(x, params.qkv)
        ends = [heads * width, (heads + kv_heads) * width, (heads + 2 * kv_heads) * width]
        q, k, v, gate = jnp.split(packed, ends, axis=-1)
        q = _head_norm(q, params.q_norm, heads, place)
        k = _head_norm(k, params.k_norm, kv_heads, place)
        if tables:
            q, k = apply_rope(q, *tables), apply_rope(k, *tables)
    with jax.named_scope("append"):
        v = v.reshape(tokens, kv_heads, width)
        kv = paged.append(kv, layer, batch.slots[place.group], k, v, place.platform)
    with jax.named_scope("attend"):
        facts = AttentionParams(config.scale, config.window, config.softcap)
        mixed = attend_segments(q, facts, params.sinks, batch, kv, layer, place)
    with jax.named_scope("out"):
        mixed = mixed.reshape(tokens, heads * width)
        if config.gated:
            mixed = mixed * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)
        return linear(mixed, params.out, place.axis), kv


def _head_norm(x, weight, heads, place):
    eps = place.norm_eps
    over_heads = not isinstance(weight, tuple) and weight.shape[0] == x.shape[-1]
    if over_heads:
        x = rms_norm(x, weight, eps, place.norm_axis)
    x = x.reshape(x.shape[0], heads, -1)
    return x if over_heads else rms_norm(x, weight, eps)


def attend_segments(q, facts: AttentionParams, sinks: Any, batch: TokenBatch, kv: PagedKv, layer, place: Placement):
    """What queries `[T, N, H]` find in the paged past, `[T, N, Hv]`, segment by segment of the step."""
    outputs, start = [], 0
    for segment in batch.segments:
        part = q[start : start + segment.num_tokens]
        rows = segment.rows[place.group]
        if segment.uniform:
            part = part.reshape(-1, rows.max_query_len, *part.shape[1:])
            out = decode_attention(part, kv, layer, rows, facts, place.platform, sinks, place.attention)
            out = out.reshape(segment.num_tokens, *out.shape[2:])
        else:
            out = prefill_attention(part, kv, layer, rows, facts, place.platform, sinks, place.attention)
        outputs.append(out)
        start += segment.num_tokens
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
