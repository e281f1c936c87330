# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul: rows sorted by group, each group times the weight of its expert.

Weights lie as checkpoints store them, `[E, F, D]`, an expert's outputs by its inputs. A group may be empty, and the
weight of an empty group is neither read into a result nor, where the implementation can help it, read at all. A row's
result is a function of that row and its expert's weight.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.activations import Activation
from pallas_kernels.dispatch import PLATFORMS, Implementation, choose

_HERE = "pallas_kernels.grouped_matmul"
_TRITON = Implementation("triton", ("cuda",), f"{_HERE}.triton:matmul", f"{_HERE}.triton:supports")
_MOSAIC = Implementation("mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu:matmul", f"{_HERE}.mosaic_tpu:supports")
IMPLEMENTATIONS = (
    _TRITON,
    _MOSAIC,
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:matmul"),
    _TRITON.interpreted,
    _MOSAIC.interpreted,
)


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    platform: str,
    bias: Any = (),
    activation: Activation | None = None,
    impl: str = "auto",
) -> Float[Array, "T Fo"]:
    """Row t of group e as `x[t] @ weights[e].T + bias[e]`, in x's dtype, accumulated in float32.

    The first `group_sizes[0]` rows are group 0's, the next are group 1's, and so on; rows past the last group come back
    as zeros. `bias` is `[E, F]` or `()`. With an `activation` the float32 sums go through it before they are rounded: a
    gated one takes the gate's rows from the first half of a weight and up's from the second, `Fo = F / 2`. Raises
    `DispatchError` if the platform has no implementation, or the one named by `impl` declines.
    """
    num_experts, width, depth = weights.shape
    assert group_sizes.shape == (num_experts,), f"{group_sizes.shape} sizes for {num_experts} groups"
    assert not (activation and activation.gated and width % 2), f"a gated activation of {width} outputs has no halves"
    facts = {
        "dtype": x.dtype,
        "weight_dtype": weights.dtype,
        "depth": depth,
        "out_width": width // 2 if activation and activation.gated else width,
    }
    matmul = choose("grouped_matmul", IMPLEMENTATIONS, platform, impl, **facts)
    return matmul(x, weights, group_sizes, bias, activation)
