# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution over sequences that go on: signature, contract, checks and implementations.

Each channel of a token's output is a weighted sum of its own last `W` inputs. The `W - 1` inputs before a step's tokens
lie in slots, `tail [L, U, W - 1, C]`, oldest first, zeros where a sequence begins; inputs of tokens that are not yet
known to stand lie beside them in `pending [L, U, J, C]`, or `()`. Both are written in place once they are donated.
See `state_rows` for what a step's rows say of them.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import PLATFORMS, Implementation, choose
from pallas_kernels.state_rows import StateRows

_HERE = "pallas_kernels.causal_conv1d"
_TRITON = Implementation("triton", ("cuda",), f"{_HERE}.triton:conv_rows")
IMPLEMENTATIONS = (_TRITON, Implementation("xla", PLATFORMS, f"{_HERE}.xla:conv_rows"), _TRITON.interpreted)
RAGGED_IMPLEMENTATIONS = (Implementation("xla", PLATFORMS, f"{_HERE}.xla:conv_ragged"),)


def conv_rows(
    x: Float[Array, "S R C"],
    weight: Float[Array, "W C"],
    bias: Any,
    tail: Float[Array, "L U W1 C"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    silu: bool,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "S R C"], Float[Array, "L U W1 C"], Any]:
    """Outputs for equal rows of `R` tokens, and the storage after them: the first token of a row is taken into the
    tail, the others become pending.

    The last tap `weight[W - 1]` is the token's own. `bias [C]` or `()` is added, then with `silu` each sum is
    multiplied by its sigmoid. Sums are float32; the result has x's dtype. Raises `ValueError` for sizes that contradict
    each other.
    """
    _check(x, weight, bias, tail, pending)
    if x.shape[1] > 1 + _most_pending(pending):
        raise ValueError(
            f"rows of {x.shape[1]} tokens leave more pending than the {_most_pending(pending)} that a slot holds; "
            "draft fewer."
        )
    run = choose("causal_conv1d", IMPLEMENTATIONS, platform, impl)
    return run(x, weight, bias, tail, pending, layer, rows, silu)


def conv_ragged(
    x: Float[Array, "T C"],
    weight: Float[Array, "W C"],
    bias: Any,
    tail: Float[Array, "L U W1 C"],
    pending: Any,
    layer: int | Int[Array, ""],
    rows: StateRows,
    silu: bool,
    platform: str,
    impl: str = "auto",
) -> tuple[Float[Array, "T C"], Float[Array, "L U W1 C"]]:
    """Outputs for ragged rows, all of whose tokens are taken in, and the tails after them.

    What comes back for tokens that belong to no sequence may be anything. Otherwise as `conv_rows`.
    """
    _check(x, weight, bias, tail, pending)
    run = choose("causal_conv1d_ragged", RAGGED_IMPLEMENTATIONS, platform, impl)
    return run(x, weight, bias, tail, pending, layer, rows, silu)


def _most_pending(pending: Any) -> int:
    return 0 if isinstance(pending, tuple) else pending.shape[2]


def _check(x, weight, bias, tail, pending) -> None:
    width, channels = weight.shape
    if x.shape[-1] != channels or tail.shape[2:] != (width - 1, channels):
        raise ValueError(
            f"{x.shape[-1]} input channels and a tail of {tail.shape[2:]} do not fit taps of {weight.shape}; correct "
            "either."
        )
    if not isinstance(bias, tuple) and bias.shape != (channels,):
        raise ValueError(f"a bias of {bias.shape} is not one for each of {channels} channels; correct either.")
    if not isinstance(pending, tuple) and pending.shape[3] != channels:
        raise ValueError(f"pending inputs of {pending.shape[3]} channels are not the {channels} of x; correct either.")
    if x.dtype != tail.dtype:
        raise ValueError(
            f"inputs are {x.dtype} and the tail keeps {tail.dtype}, so that an output would depend on where a step "
            "ended; keep the tail in the inputs' dtype."
        )
