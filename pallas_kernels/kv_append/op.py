# SPDX-License-Identifier: Apache-2.0
"""Paged append: new rows into their slots of a stacked pool, one scatter, in place once the pool is donated."""

from jaxtyping import Array, Float, Int


def kv_append(
    pool: Float[Array, "L P B K H"], layer: int | Int[Array, ""], slots: Int[Array, " T"], rows: Float[Array, "T K H"]
) -> Float[Array, "L P B K H"]:
    """The pool with `rows` written; slot s is block s // B, offset s % B. Slot 0 takes the padding rows.

    Slots of real rows differ from each other. Rows are cast to the pool's dtype.
    """
    block_size = pool.shape[2]
    return pool.at[layer, slots // block_size, slots % block_size].set(
        rows.astype(pool.dtype), mode="promise_in_bounds", wrap_negative_indices=False
    )
