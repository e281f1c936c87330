# SPDX-License-Identifier: Apache-2.0
"""The oracle: one sequence after the other, one token after the other, float32."""

import numpy as np

from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.state_rows import StateRows


def reference_ssd(tokens: SsdTokens, heads: SsdHeads, storage: SsdStorage, layer: int, rows: StateRows, uniform: bool):
    """Outputs `[T, N, H]` and the storage of `op.ssd_rows` or `op.ssd_ragged`, as numpy arrays."""
    x, dt, b, c = (np.asarray(part).astype(np.float32) for part in (tokens.x, tokens.dt, tokens.b, tokens.c))
    a, d = np.asarray(heads.a), np.asarray(heads.d)
    matrix = np.array(storage.matrix)
    pending = tuple(np.array(part) for part in storage.pending)
    per_group = x.shape[1] // b.shape[1]
    outputs = np.zeros(x.shape, np.float32)

    def taken(state, x, dt, b):
        keys = np.repeat(b, per_group, axis=0)
        return np.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * keys[:, None, :]

    for index, count in enumerate(np.asarray(rows.query_lens)):
        if count == 0:
            continue
        slot, first = int(rows.slots[index]), int(rows.query_starts[index])
        state = matrix[layer, slot].astype(np.float32) if rows.starts[index] > 0 else np.zeros(matrix.shape[2:])
        state = state.astype(np.float32)
        for step in range(int(rows.num_pending[index])):
            state = taken(state, *(part[layer, slot, step] for part in pending))
        for step in range(int(count)):
            token = first + step
            state = taken(state, x[token], dt[token], b[token])
            queries = np.repeat(c[token], per_group, axis=0)
            outputs[token] = np.einsum("nhz,nz->nh", state, queries) + d[:, None] * x[token]
            if step == 0 or not uniform:
                matrix[layer, slot] = state.astype(matrix.dtype)
            else:
                for part, new in zip(pending, (x, dt, b), strict=True):
                    part[layer, slot, step - 1] = new[token]
    return outputs, SsdStorage(matrix, pending)
