# SPDX-License-Identifier: Apache-2.0
"""Paged append in plain XLA operations: a scatter an array, in place once the pool is donated."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.format import KvFormat
from pallas_kernels.kv_formats.pages import KvPages, encode_rows

IN_BOUNDS = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


def append(
    pages: KvPages,
    layer: int | Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K Hv"],
) -> KvPages:
    """See `op.kv_append`."""
    k, k_scale = _append(pages.k, pages.k_scale, pages.format, layer, slots, keys)
    if pages.latent:
        return pages.replace(k=k, k_scale=k_scale)
    v, v_scale = _append(pages.v, pages.v_scale, pages.format, layer, slots, values)
    return pages.replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _append(codes: Array, scales: Any, kv_format: KvFormat, layer, slots, rows):
    block_size = codes.shape[2]
    block, offset = slots // block_size, slots % block_size
    per_head = not isinstance(scales, tuple) and scales.ndim == 2
    new, new_scales = encode_rows(rows, kv_format, scales[layer] if per_head else ())
    codes = codes.at[layer, block, offset].set(new, **IN_BOUNDS)
    if not isinstance(scales, tuple) and not per_head:
        scales = scales.at[layer, block, :, offset].set(new_scales, **IN_BOUNDS)
    return codes, scales
