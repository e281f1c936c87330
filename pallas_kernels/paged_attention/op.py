# SPDX-License-Identifier: Apache-2.0
"""Paged attention: signature, contract, checks and the table of implementations.

The pool is stacked by layer, `[L, P, B, K, H]`; `layer` picks one at trace time, so no layer's slice is ever
copied out. The keys and values of the new tokens are in the pool already (see `kv_append`). What lies past
`kv_lens`, before the window, or in block 0 is never part of a result, whatever bits it holds.
"""

from dataclasses import dataclass
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose

IMPLEMENTATIONS = (Implementation("xla", ("cpu", "cuda", "tpu"), "pallas_kernels.paged_attention.xla:attend"),)
RAGGED_IMPLEMENTATIONS = (
    Implementation("xla", ("cpu", "cuda", "tpu"), "pallas_kernels.paged_attention.xla:attend_ragged"),
)


@dataclass(frozen=True)
class AttentionParams:
    """Static facts of one attention layer.

    `scale` multiplies the logits, `softcap` c bounds them by `c * tanh(logit / c)` (0 is off), `window` w lets a
    query at position p see positions p-w+1 to p (0 is all).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


@struct.dataclass
class SequenceRows:
    """Where the sequences of a step lie. All int32.

    `block_tables [S, M]` holds block ids, position p of a sequence in entry p // B; `kv_lens [S]` counts the tokens
    of each sequence, the new ones included; `query_lens [S]` the new ones, the last of them at `kv_lens - 1`;
    `query_starts [S]` says where a sequence's new tokens begin in a flat step. A length of 0 is padding.
    `max_query_len` is the static bound on `query_lens` where rows are uniform; ragged rows are bounded by the step.
    """

    block_tables: Any
    kv_lens: Any
    query_lens: Any
    query_starts: Any
    max_query_len: int = struct.field(pytree_node=False)


def decode_attention(
    q: Float[Array, "S Q N H"],
    k_pool: Float[Array, "L P B K H"],
    v_pool: Float[Array, "L P B K Hv"],
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    platform: str,
) -> Float[Array, "S Q N Hv"]:
    """Attention outputs for up to `Q` query tokens a sequence, left-aligned; unused query rows come back zero.

    Softmax runs in float32; the result has q's dtype. Raises ValueError if query heads are not a multiple of KV
    heads, and `DispatchError` if the platform has no implementation.
    """
    _check(q.shape[2], k_pool.shape[3])
    attend = choose("paged_attention", IMPLEMENTATIONS, platform)
    return attend(q, k_pool, v_pool, layer, rows, params)


def prefill_attention(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "L P B K H"],
    v_pool: Float[Array, "L P B K Hv"],
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    platform: str,
) -> Float[Array, "T N Hv"]:
    """Attention outputs for ragged chunks laid end to end, row i of a sequence at `query_starts + i`.

    Rows of `q` that belong to no sequence come back zero. Otherwise as `decode_attention`.
    """
    _check(q.shape[1], k_pool.shape[3])
    attend = choose("paged_attention", RAGGED_IMPLEMENTATIONS, platform)
    return attend(q, k_pool, v_pool, layer, rows, params)


def _check(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}, which grouped-query attention "
            "needs; correct the head counts."
        )
