# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule as a CPU runs it best: a chunk at a time, in cache, and padding not at all."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.state_rows import StateRows


def delta_ragged(
    q: Float[Array, "T N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
) -> tuple[Float[Array, "T V Hv"], Float[Array, "L U V H Hv"]]:
    """See `op.delta_ragged`."""
    return xla.ragged(q, tokens, matrix, pending, layer, rows, at_once=False)
