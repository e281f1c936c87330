# SPDX-License-Identifier: Apache-2.0
"""Paged attention: signature, contract, checks and the table of implementations.

The pool is stacked by layer, `[L, P, B, K, H]`; `layer` picks one at trace time, so no layer's slice is ever
copied out. The keys and values of the new tokens are in the pool already (see `kv_append`). What lies past
`kv_lens`, before the window, or in block 0 is never part of a result, whatever bits it holds.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose

IMPLEMENTATIONS = (
    Implementation("cpu", ("cpu",), "pallas_kernels.paged_attention.cpu:attend"),
    Implementation("xla", ("cpu", "cuda", "tpu"), "pallas_kernels.paged_attention.xla:attend"),
)
RAGGED_IMPLEMENTATIONS = (
    Implementation("cpu", ("cpu",), "pallas_kernels.paged_attention.cpu:attend_ragged"),
    Implementation("xla", ("cpu", "cuda", "tpu"), "pallas_kernels.paged_attention.xla:attend_ragged"),
)

# Queries a piece of a ragged chunk: wide enough for matrix kernels, narrow enough not to pad short prompts much.
PIECE = 128
# Equal rows whose past is walked together: enough to share an operation's cost, few enough for a tile to stay in cache.
TOGETHER = 4


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
    `pieces` is what `cut_pieces` makes of ragged rows and `by_length` of equal ones, so that layers need not each do
    it, or `()`.
    """

    block_tables: Any
    kv_lens: Any
    query_lens: Any
    query_starts: Any
    max_query_len: int = struct.field(pytree_node=False)
    pieces: Any = ()


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


def cut_pieces(rows: SequenceRows, num_tokens: int) -> SequenceRows:
    """The chunks of a ragged step of `num_tokens` cut into pieces of at most `PIECE` queries, each a row of its own
    with the past that it sees. Pieces come in order, rows of padding after the last of them.

    There are at most `num_tokens / PIECE + S`, so work follows the tokens and not S times the longest chunk.
    """
    num_sequences = rows.kv_lens.shape[0]
    piece = min(PIECE, num_tokens)
    num_pieces = num_tokens // piece + num_sequences
    pieces_each = (rows.query_lens + piece - 1) // piece
    ends = jnp.cumsum(pieces_each)
    index = jnp.arange(num_pieces, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), num_sequences - 1)
    first = (index - (ends - pieces_each)[owner]) * piece
    lens = jnp.where(index < ends[-1], jnp.clip(rows.query_lens[owner] - first, 0, piece), 0)
    past = rows.kv_lens[owner] - rows.query_lens[owner]
    return SequenceRows(
        block_tables=rows.block_tables[owner],
        kv_lens=jnp.where(lens > 0, past + first + lens, 0),
        query_lens=lens,
        query_starts=rows.query_starts[owner] + first,
        max_query_len=piece,
    )


def by_length(rows: SequenceRows) -> SequenceRows | tuple[()]:
    """Equal rows, longest first and padding last: neighbours have about as much past to walk. `query_starts` tell which
    row is which. `()` if there are no more than `TOGETHER` rows."""
    if rows.kv_lens.shape[0] <= TOGETHER:
        return ()
    order = jnp.argsort(rows.kv_lens, descending=True)
    ordered = (x[order] for x in (rows.block_tables, rows.kv_lens, rows.query_lens, rows.query_starts))
    return SequenceRows(*ordered, max_query_len=rows.max_query_len)


def _check(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}, which grouped-query attention "
            "needs; correct the head counts."
        )
