# SPDX-License-Identifier: Apache-2.0
"""The oracle: one sequence, one head and one query at a time, in float64 numpy. Slow and obvious."""

import math

import numpy as np

from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows


def attend(q, k_pool, v_pool, layer: int, rows: SequenceRows, params: AttentionParams) -> np.ndarray:
    """Attention outputs `[S, Q, N, Hv]` in float64 for padded queries `[S, Q, N, H]`; unused rows are zero."""
    q, k_pool, v_pool = (np.asarray(x, np.float64) for x in (q, k_pool, v_pool))
    tables, kv_lens, query_lens = (np.asarray(x) for x in (rows.block_tables, rows.kv_lens, rows.query_lens))
    num_sequences, _, num_heads, _ = q.shape
    block_size, num_kv_heads, v_dim = v_pool.shape[2:]
    out = np.zeros((*q.shape[:3], v_dim))
    for s in range(num_sequences):
        for i in range(query_lens[s]):
            position = kv_lens[s] - query_lens[s] + i
            first = max(0, position - params.window + 1) if params.window else 0
            seen = [(tables[s, t // block_size], t % block_size) for t in range(first, position + 1)]
            for n in range(num_heads):
                head = n // (num_heads // num_kv_heads)
                logits = np.array([q[s, i, n] @ k_pool[layer, b, o, head] * params.scale for b, o in seen])
                if params.softcap:
                    logits = params.softcap * np.tanh(logits / params.softcap)
                weights = np.exp(logits - logits.max())
                weights /= math.fsum(weights)
                out[s, i, n] = sum(w * v_pool[layer, b, o, head] for w, (b, o) in zip(weights, seen, strict=True))
    return out
