# SPDX-License-Identifier: Apache-2.0
"""Paged append: new rows into their slots of a stacked pool, in place once the pool is donated."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import PLATFORMS, Implementation, choose
from pallas_kernels.kv_formats.pages import KvPages

_HERE = "pallas_kernels.kv_append"
_TRITON = Implementation("triton", ("cuda",), f"{_HERE}.triton:append", f"{_HERE}.triton:supports")
_MOSAIC = Implementation("mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu:append", f"{_HERE}.mosaic_tpu:supports")
IMPLEMENTATIONS = (
    _TRITON,
    _MOSAIC,
    # On a GPU some microseconds slower a layer and no more, so that it may step in.
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:append"),
    _TRITON.interpreted,
    _MOSAIC.interpreted,
)


def kv_append(
    pages: KvPages,
    layer: int | Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K Hv"],
    platform: str,
    impl: str = "auto",
) -> KvPages:
    """The pages with `keys` and `values` written; slot s is block s // B, offset s % B. Slot 0 takes the padding rows.

    Slots of real rows differ from each other. Rows are encoded in the pages' format; scales of single rows are written
    beside them, scales of heads are applied as they stand. Pages that have no values take none of `values`. Raises
    `DispatchError` if the platform has no implementation, or the one named by `impl` declines.
    """
    facts = {
        "kv_format": pages.kv_format,
        "num_kv_heads": pages.num_kv_heads,
        "pool_codes": pages.num_codes,
    }
    append = choose("kv_append", IMPLEMENTATIONS, platform, impl, **facts)
    return append(pages, layer, slots, keys, values)
