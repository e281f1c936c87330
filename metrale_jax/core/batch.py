# SPDX-License-Identifier: Apache-2.0
"""`TokenBatch`: what layers see of a step. It has no mode: prefill, decode and verify differ only in its numbers."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from pallas_kernels.paged_attention.op import SequenceRows
from pallas_kernels.state_rows import StateRows


@struct.dataclass
class Segment:
    """A run of consecutive tokens of the flat step that belong to one set of sequence rows.

    `rows` holds one `SequenceRows` for each attention group, `state` says where recurrent state is. `uniform` segments
    are `S` equal rows of `max_query_len` tokens, laid out row after row; others are ragged. `num_tokens` is the static
    length of the run.
    """

    rows: tuple[SequenceRows, ...]
    state: StateRows
    num_tokens: int = struct.field(pytree_node=False)
    uniform: bool = struct.field(pytree_node=False)


@struct.dataclass
class TokenBatch:
    """The flat tokens of a step, derived from states.

    int32 `[T]`: `tokens`; `positions` in their sequences; `rope_lens`, the sequence length that length-dependent
    rotary embeddings go by. `slots`: for each attention group int32 `[T]`, the pool slot that a token's key and
    value go to (0 for padding). `segments` cover the tokens in order.
    """

    tokens: Any
    positions: Any
    rope_lens: Any
    slots: tuple
    segments: tuple[Segment, ...]


def concatenate(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """One step over both batches: one pass over the weights, each segment attending to its own past."""
    return TokenBatch(
        tokens=jnp.concatenate([first.tokens, second.tokens]),
        positions=jnp.concatenate([first.positions, second.positions]),
        rope_lens=jnp.concatenate([first.rope_lens, second.rope_lens]),
        slots=tuple(jnp.concatenate(pair) for pair in zip(first.slots, second.slots, strict=True)),
        segments=(*first.segments, *second.segments),
    )
