# SPDX-License-Identifier: Apache-2.0
"""`KvPages`: keys and values of a group of layers as they lie in the pool."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from pallas_kernels.kv_formats.format import KvFormat
from pallas_kernels.kv_formats.registry import format_named


@struct.dataclass
class KvPages:
    """Codes of keys `k [L, P, B, K, H]` and values `v [L, P, B, K, Hv]` in the static format `kv_format`, and their
    float32 scales.

    `v` is `()` where values are a part of the keys (see `paged_attention.op.AttentionParams`).

    A scale belongs to one token's row of one head, `[L, P, K, B]`, or to all rows of a head, `[L, K]`; it is `()` in a
    format without scales. Those of single rows are written along with them; those of heads are constants that whoever
    makes the pool puts there.
    """

    k: Any
    v: Any
    k_scale: Any = ()
    v_scale: Any = ()
    kv_format: str = struct.field(pytree_node=False, default="float32")

    @property
    def format(self) -> KvFormat:
        """The functions of the format."""
        return format_named(self.kv_format)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.k.shape[2]

    @property
    def latent(self) -> bool:
        """Whether values are a part of the keys."""
        return isinstance(self.v, tuple)

    @property
    def num_codes(self) -> int:
        """Codes of the larger array."""
        return self.k.size if self.latent else max(self.k.size, self.v.size)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.k.shape[3]

    @property
    def scale_per_row(self) -> bool:
        """Whether each row has a scale of its own."""
        return not isinstance(self.k_scale, tuple) and self.k_scale.ndim == 4


def abstract_pages(kv_format: str, shape: tuple[int, int, int, int], head_dim: int, v_head_dim: int) -> KvPages:
    """Shapes and dtypes of the storage for `shape = (L, P, B, K)`, a scale for each row where the format has scales.
    There are no values where `v_head_dim` is 0."""
    facts = format_named(kv_format)
    layers, blocks, block_size, heads = shape

    def codes(width):
        return jax.ShapeDtypeStruct((*shape, width), jnp.dtype(facts.dtype))

    scale = jax.ShapeDtypeStruct((layers, blocks, heads, block_size), jnp.float32) if facts.scaled else ()
    if not v_head_dim:
        return KvPages(codes(head_dim), (), scale, (), kv_format)
    return KvPages(codes(head_dim), codes(v_head_dim), scale, scale, kv_format)


def encode_rows(rows: Float[Array, "T K H"], kv_format: KvFormat, scale: Any) -> tuple[Array, Any]:
    """Codes `[T, K, H]` of rows and their scales `[T, K]`, which are `()` where the format has none.

    `scale [K]` is that of each head, or `()`: then each row's scale lets its largest number have the largest code, so
    that a row's codes depend on that row alone.
    """
    if not kv_format.scaled:
        return codes_of(rows, kv_format, ()), ()
    if isinstance(scale, tuple):
        scale = row_scale(jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=-1), kv_format)
    return codes_of(rows, kv_format, scale), jnp.broadcast_to(scale, rows.shape[:2])


def row_scale(largest, kv_format: KvFormat):
    """Scales of rows whose `largest` magnitudes are to have the largest code. Traces inside any kernel."""
    return largest / kv_format.largest


def codes_of(rows, kv_format: KvFormat, scale: Any):
    """Codes of `rows [..., H]` under `scale`, one for each row, or `()`. Traces inside any kernel."""
    if not kv_format.scaled:
        return kv_format.encode(rows, kv_format.dtype)
    safe = jnp.where(scale > 0, scale, 1.0)
    return kv_format.encode(rows.astype(jnp.float32) / safe[..., None], kv_format.dtype)
