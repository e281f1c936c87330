# SPDX-License-Identifier: Apache-2.0
"""The oracle: one sequence and one token at a time, in float64 numpy. Slow and obvious."""

from typing import Any

import numpy as np

from pallas_kernels.state_rows import StateRows


def conv_rows(x, weight, bias: Any, tail, pending: Any, layer: int, rows: StateRows, silu: bool):
    """Outputs `[S, R, C]`, tail and pending of `op.conv_rows` in float64; padding is zero and writes nothing."""
    x, weight, tail, pending = _wide(x), _wide(weight), _wide(tail), _wide(pending)
    out = np.zeros(x.shape)
    for s in _used(rows):
        slot, inputs = int(rows.slots[s]), _before(tail, pending, layer, rows, s)
        for r, token in enumerate(x[s]):
            inputs = [*inputs[1:], token] if len(inputs) == len(weight) else [*inputs, token]
            out[s, r] = _activated(sum(a * b for a, b in zip(inputs, weight, strict=True)), bias, silu)
            if r == 0:
                tail[layer, slot] = inputs[1:]
            else:
                pending[layer, slot, r - 1] = token
    return out, tail, pending


def conv_ragged(x, weight, bias: Any, tail, pending: Any, layer: int, rows: StateRows, silu: bool):
    """Outputs `[T, C]` and tail of `op.conv_ragged` in float64; tokens of no sequence are zero."""
    x, weight, tail, pending = _wide(x), _wide(weight), _wide(tail), _wide(pending)
    out = np.zeros(x.shape)
    for s in _used(rows):
        inputs = _before(tail, pending, layer, rows, s)
        for t in range(int(rows.query_starts[s]), int(rows.query_starts[s] + rows.query_lens[s])):
            inputs = [*inputs[-len(weight) + 1 :], x[t]]
            out[t] = _activated(sum(a * b for a, b in zip(inputs, weight, strict=True)), bias, silu)
        tail[layer, int(rows.slots[s])] = inputs[-len(weight) + 1 :]
    return out, tail


def _wide(array):
    return array if isinstance(array, tuple) else np.array(array, np.float64)


def _used(rows):
    return [s for s, length in enumerate(np.asarray(rows.query_lens)) if length]


def _before(tail, pending, layer, rows, s):
    slot = int(rows.slots[s])
    kept = list(tail[layer, slot].copy()) if rows.starts[s] else list(np.zeros(tail.shape[2:]))
    for j in range(int(rows.num_pending[s])):
        kept = [*kept[1:], pending[layer, slot, j].copy()]
    return kept


def _activated(total, bias, silu):
    total = total if isinstance(bias, tuple) else total + np.asarray(bias, np.float64)
    return total / (1 + np.exp(-total)) if silu else total
