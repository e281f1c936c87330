# SPDX-License-Identifier: Apache-2.0
"""Paged attention: signature, contract, checks and the table of implementations.

The pages are stacked by layer, `[L, P, B, K, H]`; `layer` picks one at trace time, so no layer's slice is ever
copied out. The keys and values of the new tokens are in the pages already (see `kv_append`). What lies past
`kv_lens`, before the window, or in block 0 is never part of a result, whatever bits it holds, and blocks that lie
wholly before every window are not read.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import PLATFORMS, Implementation, choose
from pallas_kernels.kv_formats.pages import KvPages

_HERE = "pallas_kernels.paged_attention"


def _table(function: str) -> tuple[Implementation, ...]:
    """The implementations of an entry point, which have its `function` in their modules."""
    triton = Implementation("triton", ("cuda",), f"{_HERE}.triton:{function}", f"{_HERE}.triton:supports")
    mosaic = Implementation("mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu:{function}", f"{_HERE}.mosaic_tpu:supports")
    return (
        Implementation("cpu", ("cpu",), f"{_HERE}.cpu:{function}"),
        triton,
        mosaic,
        Implementation("xla", PLATFORMS, f"{_HERE}.xla:{function}", by_name_only=("cuda", "tpu")),
        triton.interpreted,
        mosaic.interpreted,
    )


# Multiplies as Hopper alone does, and has been tried on none.
_HOPPER = Implementation(
    "mosaic_gpu",
    ("cuda",),
    f"{_HERE}.mosaic_gpu:attend_ragged",
    f"{_HERE}.mosaic_gpu:supports",
    by_name_only=("cuda",),
)
IMPLEMENTATIONS = _table("attend")
RAGGED_IMPLEMENTATIONS = (*_table("attend_ragged"), _HOPPER, _HOPPER.interpreted)

# Queries a piece of a ragged chunk: wide enough for matrix kernels, narrow enough not to pad short prompts much.
PIECE = 128
# Equal rows whose past is walked together: enough to share an operation's cost, few enough for a tile to stay in cache.
TOGETHER = 4
# New tokens a row under a tree mask: what the bits of an int32 can say, the sign left alone.
MAX_TREE = 31


@dataclass(frozen=True)
class AttentionParams:
    """Static facts of one attention layer.

    `scale` multiplies the logits, `softcap` c bounds them by `c * tanh(logit / c)` (0 is off), `window` w lets a
    query at position p see positions p-w+1 to p (0 is all). Values are the first `latent` numbers of the keys, and the
    pages hold none of their own, where that is above 0.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    latent: int = 0

    def v_dim(self, pages: KvPages) -> int:
        """The width of values."""
        return self.latent or pages.v.shape[-1]


@struct.dataclass
class SequenceRows:
    """Where the sequences of a step lie. All int32.

    `block_tables [S, M]` holds block ids, position p of a sequence in entry p // B; `kv_lens [S]` counts the tokens
    of each sequence, the new ones included; `query_lens [S]` the new ones, the last of them at `kv_lens - 1`;
    `query_starts [S]` says where a sequence's new tokens begin in a flat step. A length of 0 is padding.
    `max_query_len` is the static bound on `query_lens` where rows are uniform; ragged rows are bounded by the step.
    `tree [S, Q]` makes the new tokens of equal rows a tree instead of a run: bit j of entry i says that new token i
    sees new token j, itself included, and its position is the past plus the bits set before its own. `()` is a run.
    `pieces` is what `cut_pieces` makes of ragged rows and `by_length` of equal ones, so that layers need not each do
    it, or `()`.
    """

    block_tables: Any
    kv_lens: Any
    query_lens: Any
    query_starts: Any
    max_query_len: int = struct.field(pytree_node=False)
    pieces: Any = ()
    tree: Any = ()


def decode_attention(
    q: Float[Array, "S Q N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    platform: str,
    sinks: Any = (),
    impl: str = "auto",
) -> Float[Array, "S Q N Hv"]:
    """Attention outputs for up to `Q` query tokens a sequence, left-aligned; unused query rows come back zero.

    Softmax runs in float32; the result has q's dtype. `sinks [N]` are logits that each head's softmax counts in its
    sum and that carry no value, or `()`. Raises ValueError for sizes that contradict each other, and `DispatchError`
    if the platform has no implementation, or the one named by `impl` declines.
    """
    _check(q.shape, pages, rows, params, sinks)
    facts = _facts(q.shape[2], q, pages, params, rows)
    attend = choose("paged_attention", IMPLEMENTATIONS, platform, impl, **facts)
    return attend(q, pages, layer, rows, params, sinks)


def prefill_attention(
    q: Float[Array, "T N H"],
    pages: KvPages,
    layer: int | Int[Array, ""],
    rows: SequenceRows,
    params: AttentionParams,
    platform: str,
    sinks: Any = (),
    impl: str = "auto",
) -> Float[Array, "T N Hv"]:
    """Attention outputs for ragged chunks laid end to end, row i of a sequence at `query_starts + i`.

    Rows of `q` that belong to no sequence come back zero. Otherwise as `decode_attention`, but for trees.
    """
    assert isinstance(rows.tree, tuple), "ragged chunks are runs of tokens; a tree needs equal rows"
    _check(q.shape, pages, rows, params, sinks)
    facts = _facts(q.shape[1], q, pages, params, rows)
    attend = choose("paged_attention_ragged", RAGGED_IMPLEMENTATIONS, platform, impl, **facts)
    return attend(q, pages, layer, rows, params, sinks)


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
    tree = () if isinstance(rows.tree, tuple) else rows.tree[order]
    return SequenceRows(*ordered, max_query_len=rows.max_query_len, tree=tree)


def visible(
    key: Int[Array, " C"], rows: SequenceRows, query_len: int, window: int
) -> tuple[Bool[Array, "S Q C"], Bool[Array, "S C"]]:
    """Which of the positions `key` each query sees, and which any query of its row may need.

    Where it is false in the second, the memory behind a position may hold anything.
    """
    first = rows.kv_lens - rows.query_lens
    offset = jnp.arange(query_len, dtype=jnp.int32)
    needed = key < rows.kv_lens[:, None]
    if isinstance(rows.tree, tuple):
        depth = offset
        seen = key <= (first[:, None] + offset)[..., None]
    else:
        depth = jax.lax.population_count(rows.tree) - 1
        new = key - first[:, None]
        bit = jnp.right_shift(rows.tree[..., None], jnp.clip(new, 0, MAX_TREE - 1)[:, None]) & 1
        seen = (new < 0)[:, None] | ((bit > 0) & (new < rows.query_lens[:, None])[:, None])
    if window:
        # A window is no shorter than a tree's rows, so that it only ever ends in the past.
        seen &= key > (first[:, None] + depth)[..., None] - window
        # Blocks that every window has passed may have been given away.
        needed &= key > first[:, None] - window
    return seen, needed


def _facts(num_heads: int, q, pages: KvPages, params: AttentionParams, rows: SequenceRows) -> dict:
    """What an implementation may decline by."""
    return {
        "num_heads": num_heads,
        "num_kv_heads": pages.num_kv_heads,
        "head_dim": q.shape[-1],
        "v_head_dim": params.v_dim(pages),
        "latent": params.latent,
        "block_size": pages.block_size,
        "dtype": q.dtype.name,
        "kv_format": pages.kv_format,
        "query_len": rows.max_query_len,
        "pool_codes": pages.num_codes,
    }


def _check(shape: tuple, pages: KvPages, rows: SequenceRows, params: AttentionParams, sinks: Any) -> None:
    num_heads, head_dim = shape[-2:]
    if num_heads % pages.num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={pages.num_kv_heads}, which grouped-query "
            "attention needs; correct the head counts."
        )
    if head_dim != pages.k.shape[-1]:
        raise ValueError(
            f"head_dim={head_dim} of the queries is not the {pages.k.shape[-1]} of the keys; correct either."
        )
    if pages.latent != bool(params.latent) or params.latent > head_dim:
        held = "none of their own" if pages.latent else "values of their own"
        raise ValueError(
            f"latent={params.latent} numbers of a key of {head_dim} cannot be the values of pages that have {held}; "
            "correct either."
        )
    if not isinstance(sinks, tuple) and sinks.shape != (num_heads,):
        raise ValueError(f"sinks of shape {sinks.shape} are not one for each of num_heads={num_heads}; correct either.")
    if isinstance(rows.tree, tuple):
        return
    if shape[1] > MAX_TREE:
        raise ValueError(f"a tree of {shape[1]} new tokens a row is above the {MAX_TREE} of a mask; draft fewer.")
    if params.window and params.window < shape[1]:
        raise ValueError(
            f"window={params.window} is shorter than a tree's {shape[1]} new tokens a row; draft no more than that."
        )
