# SPDX-License-Identifier: Apache-2.0
"""The oracle: one sequence, one token and one head at a time, in float64 numpy. Slow and obvious."""

from typing import Any

import numpy as np

from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.state_rows import StateRows


def delta_rows(q, tokens: DeltaTokens, matrix, pending: Any, layer: int, rows: StateRows):
    """Outputs `[S, R, V, Hv]`, matrix and pending of `op.delta_rows` in float64; padding is zero and writes nothing."""
    q, matrix, tokens, pending = _wide(q), _wide(matrix), _tokens(tokens), _tokens(pending)
    out = np.zeros((*q.shape[:2], *tokens.values.shape[2:]))
    for s in _used(rows):
        slot, state = int(rows.slots[s]), _before(matrix, pending, layer, rows, s)
        for r in range(q.shape[1]):
            state, out[s, r] = _step(state, _at(tokens, (s, r)), q[s, r])
            if r == 0:
                matrix[layer, slot] = state
            else:
                for name in vars(pending):
                    getattr(pending, name)[layer, slot, r - 1] = getattr(tokens, name)[s, r]
    return out, matrix, pending


def delta_ragged(q, tokens: DeltaTokens, matrix, pending: Any, layer: int, rows: StateRows):
    """Outputs `[T, V, Hv]` and matrix of `op.delta_ragged` in float64."""
    q, matrix, tokens, pending = _wide(q), _wide(matrix), _tokens(tokens), _tokens(pending)
    out = np.zeros((len(q), *tokens.values.shape[1:]))
    for s in _used(rows):
        state = _before(matrix, pending, layer, rows, s)
        for t in range(int(rows.query_starts[s]), int(rows.query_starts[s] + rows.query_lens[s])):
            state, out[t] = _step(state, _at(tokens, t), q[t])
        matrix[layer, int(rows.slots[s])] = state
    return out, matrix


def _step(state, token: DeltaTokens, q):
    """The states `[V, H, Hv]` after a token, and what its queries read `[V, Hv]`."""
    state, out = state.copy(), np.zeros((state.shape[0], state.shape[2]))
    each = state.shape[0] // len(q)
    for head in range(len(state)):
        key = token.keys[head // each]
        state[head] *= np.exp(token.decays[head]).reshape(-1, 1)
        wrong = token.values[head] - key @ state[head]
        state[head] += np.outer(key, token.strengths[head] * wrong)
        out[head] = q[head // each] @ state[head]
    return state, out


def _before(matrix, pending, layer, rows, s):
    slot = int(rows.slots[s])
    state = matrix[layer, slot] if rows.starts[s] else np.zeros(matrix.shape[2:])
    for j in range(int(rows.num_pending[s])):
        token = _at(pending, (layer, slot, j))
        state, _ = _step(state, token, np.zeros(token.keys.shape))
    return state


def _wide(array):
    return np.array(array, np.float64)


def _tokens(tokens):
    return tokens if isinstance(tokens, tuple) else DeltaTokens(*(_wide(leaf) for leaf in vars(tokens).values()))


def _at(tokens: DeltaTokens, index) -> DeltaTokens:
    return DeltaTokens(*(leaf[index] for leaf in vars(tokens).values()))


def _used(rows):
    return [s for s, length in enumerate(np.asarray(rows.query_lens)) if length]
