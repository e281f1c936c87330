# SPDX-License-Identifier: Apache-2.0
"""The oracle: one sequence, one head and one query at a time, in float64 numpy. Slow and obvious."""

import math
from typing import Any

import numpy as np

from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows


def attend(q, pages: KvPages, layer: int, rows: SequenceRows, params: AttentionParams, sinks: Any = ()) -> np.ndarray:
    """Attention outputs `[S, Q, N, Hv]` in float64 for padded queries `[S, Q, N, H]`; unused rows are zero."""
    q, keys = np.asarray(q, np.float64), plain_rows(pages.k, pages.k_scale)
    values = keys[..., : params.latent] if params.latent else plain_rows(pages.v, pages.v_scale)
    tables, kv_lens, query_lens = (np.asarray(x) for x in (rows.block_tables, rows.kv_lens, rows.query_lens))
    num_sequences, _, num_heads, _ = q.shape
    block_size, num_kv_heads, v_dim = values.shape[2:]
    out = np.zeros((*q.shape[:3], v_dim))
    for s in range(num_sequences):
        for i in range(query_lens[s]):
            seen = [
                (tables[s, t // block_size], t % block_size)
                for t in seen_positions(int(kv_lens[s] - query_lens[s]), i, rows.tree, s, params.window)
            ]
            for n in range(num_heads):
                head = n // (num_heads // num_kv_heads)
                logits = np.array([q[s, i, n] @ keys[layer, b, o, head] * params.scale for b, o in seen])
                if params.softcap:
                    logits = params.softcap * np.tanh(logits / params.softcap)
                sink = -math.inf if isinstance(sinks, tuple) else float(sinks[n])
                highest = max(logits.max(), sink)
                weights = np.exp(logits - highest)
                weights /= math.fsum(weights) + math.exp(sink - highest)
                out[s, i, n] = sum(w * values[layer, b, o, head] for w, (b, o) in zip(weights, seen, strict=True))
    return out


def seen_positions(past: int, query: int, tree: Any, row: int, window: int) -> list[int]:
    """The positions that new token `query` of a row sees: of the past, and of the new tokens by run or by tree."""
    if isinstance(tree, tuple):
        new, depth = range(query + 1), query
    else:
        bits = int(tree[row, query])
        new = [j for j in range(31) if bits >> j & 1]
        depth = len(new) - 1
    first = max(0, past + depth - window + 1) if window else 0
    return [*range(first, past), *(past + j for j in new if past + j >= first)]


def plain_rows(codes, scales: Any) -> np.ndarray:
    """Float64 rows `[L, P, B, K, H]` of codes in any format."""
    rows = np.asarray(codes).astype(np.float64)
    if isinstance(scales, tuple):
        return rows
    scales = np.asarray(scales, np.float64)
    by_row = scales[:, None, None, :] if scales.ndim == 2 else scales.swapaxes(2, 3)
    return rows * by_row[..., None]
