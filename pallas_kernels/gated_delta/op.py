# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (Yang et al. 2024): signature, contract, checks and the tables of implementations.

A head's state is a matrix `M [H, Hv]`, zeros where a sequence begins. A token decays it by `d`, replaces what it holds
under the key `k` by the value `v` with strength `b`, and reads it with the query `q`:

    M <- diag(exp(d)) M;   M <- M + k b (v - k^T M)^T;   o = q^T M

`d <= 0` is one number a head (Gated DeltaNet) or one a row of the matrix (Kimi Delta Attention, Kimi Team 2025). Heads
of queries and keys may be fewer than those of values: each serves as many consecutive ones.

States lie in slots, `matrix [L, U, V, H, Hv]`, in the dtype that they are kept in; all else is computed in float32.
`pending` holds the tokens that wait to be known to stand, `DeltaTokens` of `[L, U, J, ...]`, or `()`. Both are written
in place once they are donated. See `state_rows` for what a step's rows say of them. How strong a decay is does not
matter: no power above one is ever taken.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import PLATFORMS, Implementation, choose
from pallas_kernels.state_rows import StateRows

_HERE = "pallas_kernels.gated_delta"
_TRITON = Implementation("triton", ("cuda",), f"{_HERE}.triton:delta_rows", f"{_HERE}.triton:supports")
_MOSAIC = Implementation("mosaic_tpu", ("tpu",), f"{_HERE}.mosaic_tpu:delta_rows", f"{_HERE}.mosaic_tpu:supports")
IMPLEMENTATIONS = (
    _TRITON,
    _MOSAIC,
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:delta_rows"),
    _TRITON.interpreted,
    _MOSAIC.interpreted,
)


def _ragged(name: str, platform: str, module: str) -> Implementation:
    return Implementation(name, (platform,), f"{_HERE}.{module}:delta_ragged", f"{_HERE}.{module}:supports")


_TRITON_RAGGED = _ragged("triton", "cuda", "triton_ragged")
_MOSAIC_RAGGED = _ragged("mosaic_tpu", "tpu", "mosaic_tpu_ragged")
RAGGED_IMPLEMENTATIONS = (
    _TRITON_RAGGED,
    _MOSAIC_RAGGED,
    Implementation("cpu", ("cpu",), f"{_HERE}.cpu:delta_ragged"),
    Implementation("xla", PLATFORMS, f"{_HERE}.xla:delta_ragged"),
    _TRITON_RAGGED.interpreted,
    _MOSAIC_RAGGED.interpreted,
)


@struct.dataclass
class DeltaTokens:
    """What tokens do to the state. `keys [..., N, H]`, `values [..., V, Hv]`; `decays`, the logarithms of what is kept,
    `[..., V]` or `[..., V, H]`; `strengths [..., V]`."""

    keys: Any
    values: Any
    decays: Any
    strengths: Any

    @property
    def per_channel(self) -> bool:
        """Whether each row of a head's matrix has a decay of its own."""
        return self.decays.ndim > self.strengths.ndim


def delta_rows(
    q: Float[Array, "S R N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "S R V Hv"], Float[Array, "L U V H Hv"], Any]:
    """Outputs for equal rows of `R` tokens, the states after each row's first token, and the others as pending.

    Accepted pending tokens come first; what is stored behind them may be anything. Outputs have q's dtype. Raises
    `ValueError` for sizes that contradict each other.
    """
    _check(q, tokens, matrix, pending)
    most = 0 if isinstance(pending, tuple) else pending.keys.shape[2]
    if q.shape[1] > 1 + most:
        raise ValueError(
            f"rows of {q.shape[1]} tokens leave more pending than the {most} that a slot holds; draft fewer."
        )
    run = choose("gated_delta", IMPLEMENTATIONS, platform, impl, tokens=most + q.shape[1], **_facts(q, matrix))
    return run(q, tokens, matrix, pending, layer, rows)


def delta_ragged(
    q: Float[Array, "T N H"],
    tokens: DeltaTokens,
    matrix: Float[Array, "L U V H Hv"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "T V Hv"], Float[Array, "L U V H Hv"]]:
    """Outputs for ragged rows laid end to end, and the states after all their tokens.

    Tokens of no sequence come back zero, whatever they hold. Otherwise as `delta_rows`.
    """
    _check(q, tokens, matrix, pending)
    run = choose("gated_delta_ragged", RAGGED_IMPLEMENTATIONS, platform, impl, **_facts(q, matrix))
    return run(q, tokens, matrix, pending, layer, rows)


def _facts(q, matrix) -> dict:
    rows, columns = matrix.shape[3:]
    group = matrix.shape[2] // q.shape[2]
    return {"rows": rows, "columns": columns, "group": group, "dtype": matrix.dtype.name, "codes": matrix.size}


def _check(q, tokens: DeltaTokens, matrix, pending) -> None:
    before, (key_heads, key_dim) = q.shape[:-2], q.shape[-2:]
    heads, rows, columns = matrix.shape[2:]
    if heads % key_heads:
        raise ValueError(
            f"{heads} heads of values are not a multiple of {key_heads} heads of keys; correct the head counts."
        )
    wanted = {
        "keys": (key_heads, rows),
        "values": (heads, columns),
        "decays": (heads, rows) if tokens.per_channel else (heads,),
        "strengths": (heads,),
    }
    for name, shape in wanted.items():
        found = getattr(tokens, name).shape
        if found != (*before, *shape) or rows != key_dim:
            raise ValueError(
                f"{name} of {found} do not fit queries of {q.shape} and states of {matrix.shape[2:]}; correct either."
            )
        if not isinstance(pending, tuple) and getattr(pending, name).shape[3:] != shape:
            raise ValueError(
                f"pending {name} of {getattr(pending, name).shape[3:]} a token are not {shape}; correct either."
            )
