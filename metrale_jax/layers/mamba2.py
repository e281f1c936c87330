# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Dao and Gu 2024): a short convolution, a state space scan and a gated norm between two projections."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import Segment, TokenBatch
from metrale_jax.layers.linear import linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.recurrent import Recurrent, RecurrentSpec
from pallas_kernels.causal_conv1d.op import conv_ragged, conv_rows
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens, ssd_ragged, ssd_rows


@dataclass(frozen=True)
class Mamba2Config:
    """Static facts of one Mamba-2 layer. The `num_heads / num_groups` heads of a group share B and C, and the gated
    norm is over one group's channels at a time.

    Time steps are clamped to `[min_step, max_step]`. The gate multiplies after the norm where `norm_before_gate`.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    min_step: float = 0.0
    max_step: float = float("inf")
    norm_before_gate: bool = False

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that are convolved: the heads', then B's and C's."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim


@struct.dataclass
class Mamba2Params:
    """`in_proj [inner + conv + N, D]` gives the gate, what is convolved and each head's time step; `out_proj
    [D, inner]`.

    `conv_weight [W, conv]`, the last row for the token itself, and `conv_bias [conv]` or `()`. Float32: `step_bias
    [N]`, the rate `a [N]` (negative), the skip `d [N]`, and `norm [inner]`, or `()` for a layer that has none.
    """

    in_proj: Any
    conv_weight: Any
    conv_bias: Any
    step_bias: Any
    a: Any
    d: Any
    norm: Any
    out_proj: Any


def mamba2_state(config: Mamba2Config, formats: StateFormats) -> RecurrentSpec:
    """What the layer keeps of a sequence; a pending token as `pallas_kernels.ssd` wants it: x, its step, and B."""
    heads = (config.num_heads, config.head_dim)
    return RecurrentSpec(
        *heads,
        config.state_dim,
        config.conv_dim,
        config.conv_width,
        inputs=(heads, heads[:1], (config.num_groups, config.state_dim)),
        num_pending=formats.num_pending,
        dtype=formats.recurrent,
        input_dtype=formats.inputs,
        max_norm=formats.max_norm,
        norm_tokens=formats.norm_tokens,
    )


def mamba2(
    x: Float[Array, "T D"],
    params: Mamba2Params,
    config: Mamba2Config,
    tables: tuple,
    batch: TokenBatch,
    storage: Recurrent,
    layer: int | Int[Array, ""],
    place: Placement,
) -> tuple[Float[Array, "T D"], Recurrent]:
    """The layer's output, and its group's storage with the step's tokens taken in. `tables` are `()`."""
    with jax.named_scope("in_proj"):
        packed = linear(x, params.in_proj)
        gate, inputs, steps = jnp.split(packed, [config.inner_dim, config.inner_dim + config.conv_dim], axis=-1)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + params.step_bias)
        steps = jnp.clip(steps, config.min_step, config.max_step)
    outputs, start = [], 0
    for segment in batch.segments:
        part = slice(start, start + segment.num_tokens)
        with jax.named_scope("conv"):
            mixed, storage = _convolved(inputs[part], params, storage, layer, segment, place.platform)
        with jax.named_scope("scan"):
            scanned, storage = _scanned(mixed, steps[part], params, config, storage, layer, segment, place.platform)
        outputs.append(scanned)
        start += segment.num_tokens
    scanned = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
    with jax.named_scope("out_proj"):
        return linear(
            _gated(scanned, gate, params.norm, config, place.norm_eps).astype(x.dtype), params.out_proj
        ), storage


def _convolved(inputs, params: Mamba2Params, storage: Recurrent, layer, segment: Segment, platform: str):
    arguments = (params.conv_weight, params.conv_bias, storage.conv, storage.pending_conv, layer, segment.state, True)
    if not segment.uniform:
        mixed, conv = conv_ragged(inputs, *arguments, platform)
        return mixed, storage.replace(conv=conv)
    rows = inputs.reshape(-1, segment.state.max_query_len, inputs.shape[1])
    mixed, conv, pending = conv_rows(rows, *arguments, platform)
    return mixed.reshape(inputs.shape), storage.replace(conv=conv, pending_conv=pending)


def _scanned(mixed, steps, params: Mamba2Params, config: Mamba2Config, storage, layer, segment, platform):
    tokens = mixed.shape[0]
    shared = (config.num_groups, config.state_dim)
    x, b, c = jnp.split(mixed, [config.inner_dim, config.inner_dim + shared[0] * shared[1]], axis=-1)
    step = SsdTokens(
        x.reshape(tokens, config.num_heads, config.head_dim),
        steps,
        b.reshape(tokens, *shared),
        c.reshape(tokens, *shared),
    )
    take = ssd_rows if segment.uniform else ssd_ragged
    kept = SsdStorage(storage.matrix, storage.pending)
    outputs, kept = take(step, SsdHeads(params.a, params.d), kept, layer, segment.state, platform)
    return outputs.reshape(tokens, -1), storage.replace(matrix=kept.matrix, pending=kept.pending)


def _gated(scanned, gate, weight, config: Mamba2Config, eps: float):
    """Float32 `[T, inner]`: normed over each group's channels, and gated before or after."""
    gate = jax.nn.silu(gate.astype(jnp.float32))
    if not config.norm_before_gate:
        scanned = scanned * gate
    if not isinstance(weight, tuple):
        by_group = (config.num_groups, config.inner_dim // config.num_groups)
        normed = rms_norm(scanned.reshape(-1, *by_group), weight.reshape(by_group), eps)
        scanned = normed.reshape(scanned.shape)
    return scanned * gate if config.norm_before_gate else scanned
