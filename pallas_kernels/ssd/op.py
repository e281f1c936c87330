# SPDX-License-Identifier: Apache-2.0
"""State space duality (Dao and Gu 2024, Mamba-2): signature, contract, checks and the table of implementations.

A head's state is a matrix `h [H, Z]`. Token t makes of it `h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T` and gives
`y_t = h_t c_t + d x_t`. The `N / K` heads of a group share `b` and `c`. States are stacked by layer, `[L, U, N, H, Z]`;
`layer` picks one at trace time. Which slots are read and written, what of their pending rows counts and which tokens
stand is told by `StateRows`; whatever else the memory holds, NaN included, is never part of a result.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import PLATFORMS, Implementation, choose
from pallas_kernels.state_rows import StateRows

_HERE = "pallas_kernels.ssd"
_TRITON = Implementation("triton", ("cuda",), f"{_HERE}.triton:take_rows", f"{_HERE}.triton:supports")
_TPU = Implementation("mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu:take_rows", f"{_HERE}.mosaic_tpu:supports")
IMPLEMENTATIONS = (
    _TRITON,
    _TPU,
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:take_rows"),
    _TRITON.interpreted,
    _TPU.interpreted,
)
_TRITON_RAGGED = Implementation(
    "triton", ("cuda",), f"{_HERE}.triton_ragged:take_ragged", f"{_HERE}.triton_ragged:supports"
)
_TPU_RAGGED = Implementation(
    "mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu_ragged:take_ragged", f"{_HERE}.mosaic_tpu_ragged:supports"
)
RAGGED_IMPLEMENTATIONS = (
    _TRITON_RAGGED,
    _TPU_RAGGED,
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:take_ragged"),
    _TRITON_RAGGED.interpreted,
    _TPU_RAGGED.interpreted,
)


@struct.dataclass
class SsdTokens:
    """The tokens of a step: `x [T, N, H]`, step sizes `dt [T, N]` (not negative, float32), `b` and `c` `[T, K, Z]`."""

    x: Any
    dt: Any
    b: Any
    c: Any


@struct.dataclass
class SsdHeads:
    """What a layer's heads are made with, float32 `[N]`: the rate `a` (negative) and the skip `d`."""

    a: Any
    d: Any


@struct.dataclass
class SsdStorage:
    """`matrix [L, U, N, H, Z]`, and the pending rows' float32 `x [L, U, J, N, H]`, `dt [L, U, J, N]` and `b
    [L, U, J, K, Z]`, in this order, or `()` where nothing is ever pending."""

    matrix: Any
    pending: tuple = ()

    @property
    def num_pending(self) -> int:
        """The pending rows that a slot has room for."""
        return self.pending[0].shape[2] if self.pending else 0


def ssd_rows(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """Float32 outputs of equal rows of up to `max_query_len` tokens, and the storage after them.

    The pending rows that count and a row's first token are taken into its state, which is read and written once. The
    other tokens give outputs as if they followed, and become the slot's pending rows. Outputs of tokens that are not
    there are zero. Raises ValueError for sizes that contradict each other, `DispatchError` if no implementation serves.
    """
    _check(tokens, storage)
    if rows.max_query_len - 1 > storage.num_pending:
        raise ValueError(
            f"rows of {rows.max_query_len} tokens leave more pending than the {storage.num_pending} that a slot has "
            "room for; draft fewer, or make the storage with more."
        )
    take = choose("ssd", IMPLEMENTATIONS, platform, impl, **_facts(tokens, storage))
    return take(tokens, heads, storage, layer, rows)


def ssd_ragged(
    tokens: SsdTokens,
    heads: SsdHeads,
    storage: SsdStorage,
    layer: int | Int[Array, ""],
    rows: StateRows,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "T N H"], SsdStorage]:
    """Float32 outputs of ragged rows, and the storage after all their tokens, with nothing pending.

    The pending rows that count are taken in first. Outputs of tokens of no sequence are zero. Otherwise as `ssd_rows`.
    """
    _check(tokens, storage)
    take = choose("ssd_ragged", RAGGED_IMPLEMENTATIONS, platform, impl, **_facts(tokens, storage))
    return take(tokens, heads, storage, layer, rows)


def _facts(tokens: SsdTokens, storage: SsdStorage) -> dict:
    """What an implementation may decline by."""
    return {
        "num_heads": tokens.x.shape[1],
        "head_dim": tokens.x.shape[2],
        "num_groups": tokens.b.shape[1],
        "state_dim": tokens.b.shape[2],
        "dtype": tokens.x.dtype.name,
        "state_dtype": storage.matrix.dtype.name,
        "state_elements": storage.matrix.size,
        "num_pending": storage.num_pending,
    }


def _check(tokens: SsdTokens, storage: SsdStorage) -> None:
    _, num_heads, head_dim = tokens.x.shape
    _, num_groups, state_dim = tokens.b.shape
    if num_heads % num_groups:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_groups={num_groups}, whose b and c heads share; correct "
            "either."
        )
    if storage.matrix.shape[2:] != (num_heads, head_dim, state_dim):
        raise ValueError(
            f"states of shape {storage.matrix.shape[2:]} are not the {(num_heads, head_dim, state_dim)} of the tokens; "
            "correct either."
        )
