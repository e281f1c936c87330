# SPDX-License-Identifier: Apache-2.0
"""What layers of the gated delta rule share: a short convolution of queries, keys and values, then the rule itself,
segment by segment of a step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import Segment, TokenBatch
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.recurrent import Recurrent, RecurrentSpec
from pallas_kernels.causal_conv1d.op import conv_ragged, conv_rows
from pallas_kernels.gated_delta.op import DeltaTokens, delta_ragged, delta_rows

# Under the root when queries and keys are made of length one, as flash-linear-attention has it.
LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of queries and keys, each `key_dim` wide, heads of values, each `value_dim` wide, and the window of the
    convolution over all their channels. Decays are one a head or, `per_channel`, one for each channel of the keys."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    per_channel: bool = False

    @property
    def channels(self) -> int:
        """The rows of queries, of keys and of values, in this order."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def delta_state(heads: DeltaHeads, formats: StateFormats) -> RecurrentSpec:
    """What a layer keeps of a sequence."""
    decays = (heads.heads, heads.key_dim) if heads.per_channel else (heads.heads,)
    return RecurrentSpec(
        num_heads=heads.heads,
        rows=heads.key_dim,
        columns=heads.value_dim,
        conv_channels=heads.channels,
        conv_width=heads.conv_width,
        inputs=((heads.key_heads, heads.key_dim), (heads.heads, heads.value_dim), decays, (heads.heads,)),
        num_pending=formats.num_pending,
        dtype=formats.recurrent,
        input_dtype=formats.inputs,
        max_norm=formats.max_norm,
        norm_tokens=formats.norm_tokens,
    )


def delta_rule(
    x: Float[Array, "T C"],
    taps: Float[Array, "W C"],
    gates: tuple[Array, Array],
    heads: DeltaHeads,
    batch: TokenBatch,
    storage: Recurrent,
    layer: int | Int[Array, ""],
    platform: str,
) -> tuple[Float[Array, "T V Hv"], Recurrent]:
    """What the queries in `x` read, and the storage after the step. `gates` are the tokens' decays and strengths."""
    outputs, start = [], 0
    for segment in batch.segments:
        parts = tuple(array[start : start + segment.num_tokens] for array in (x, *gates))
        run = _equal if segment.uniform else _ragged
        out, storage = run(segment, *parts, taps, heads, storage, layer, platform)
        outputs.append(out)
        start += segment.num_tokens
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs), storage


def _equal(segment: Segment, x, decays, strengths, taps, heads, storage, layer, platform):
    rows = segment.state
    x, decays, strengths = (array.reshape(-1, rows.max_query_len, *array.shape[1:]) for array in (x, decays, strengths))
    with jax.named_scope("conv"):
        x, conv, pending_conv = conv_rows(x, taps, (), storage.conv, storage.pending_conv, layer, rows, True, platform)
    with jax.named_scope("delta"):
        q, tokens = _tokens(x, decays, strengths, heads)
        waiting = DeltaTokens(*storage.pending) if storage.pending else ()
        out, matrix, waiting = delta_rows(q, tokens, storage.matrix, waiting, layer, rows, platform)
    pending = tuple(jax.tree.leaves(waiting))
    return out.reshape(-1, *out.shape[2:]), Recurrent(matrix, conv, pending_conv, pending)


def _ragged(segment: Segment, x, decays, strengths, taps, heads, storage, layer, platform):
    rows = segment.state
    with jax.named_scope("conv"):
        x, conv = conv_ragged(x, taps, (), storage.conv, storage.pending_conv, layer, rows, True, platform)
    with jax.named_scope("delta"):
        q, tokens = _tokens(x, decays, strengths, heads)
        waiting = DeltaTokens(*storage.pending) if storage.pending else ()
        out, matrix = delta_ragged(q, tokens, storage.matrix, waiting, layer, rows, platform)
    return out, storage.replace(matrix=matrix, conv=conv)


def _tokens(x, decays, strengths, heads: DeltaHeads) -> tuple[Array, DeltaTokens]:
    """Queries and tokens in float32 of the convolved channels `[..., C]`."""
    lead, width = x.shape[:-1], heads.key_heads * heads.key_dim
    q, k, v = jnp.split(x.astype(jnp.float32), [width, 2 * width], axis=-1)
    q = _of_length_one(q.reshape(*lead, heads.key_heads, heads.key_dim)) * heads.key_dim**-0.5
    k = _of_length_one(k.reshape(*lead, heads.key_heads, heads.key_dim))
    return q, DeltaTokens(k, v.reshape(*lead, heads.heads, heads.value_dim), decays, strengths)


def _of_length_one(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPS)
