# SPDX-License-Identifier: Apache-2.0
"""The oracle: one row at a time, in float64 numpy. Slow and obvious."""

import math
from typing import Any

import numpy as np

from pallas_kernels.activations import Activation

_SCALAR = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def matmul(x, weights, group_sizes, bias: Any = (), activation: Activation | None = None) -> np.ndarray:
    """Float64 `[T, Fo]`; rows past the last group are zero. See `op.grouped_matmul`."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    gated = activation is not None and activation.gated
    out = np.zeros((len(x), weights.shape[1] // 2 if gated else weights.shape[1]))
    row = 0
    for expert, size in enumerate(np.asarray(group_sizes)):
        for _ in range(int(size)):
            sums = weights[expert] @ x[row]
            if not isinstance(bias, tuple):
                sums = sums + np.asarray(bias, np.float64)[expert]
            out[row] = sums if activation is None else _activated(sums, activation)
            row += 1
    return out


def _activated(sums: np.ndarray, activation: Activation) -> np.ndarray:
    gate, up = np.split(sums, 2) if activation.gated else (sums, np.ones_like(sums))
    if activation.limit:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    hidden = _SCALAR[activation.name](gate * activation.slope) / activation.slope
    return hidden * (up + activation.shift) if activation.gated else hidden
