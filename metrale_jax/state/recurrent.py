# SPDX-License-Identifier: Apache-2.0
"""Recurrent state: one matrix a head, the tail of a short convolution, and inputs that wait for their verdict.

Rolling back does not exist. A step that runs drafts computes their outputs without taking them into the state and keeps
what would: the pending rows. The next step folds the accepted ones in, before its own tokens. Which were accepted is
told by positions: the pool knows how many tokens a slot has taken in, the sequence how long it is.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax.sharding import axes


@dataclass(frozen=True)
class RecurrentSpec:
    """What one recurrent layer keeps for a sequence.

    A matrix `[num_heads, rows, columns]` in `dtype`; the last `conv_width - 1` inputs of `conv_channels`, in
    `input_dtype`; and of each of up to `num_pending` tokens its convolution inputs and, for every entry of `inputs`, a
    float32 array of that shape with which a layer's kernel can take the token in.

    After every `norm_tokens` tokens, 0 for never, a head's matrix has a Frobenius norm of at most `max_norm`: long
    prefills of models whose decay is weak can make it grow without bound. It is where the sequence stands that counts,
    so steps have to end there (see `limit_slots`), and nothing hangs on how a prompt was cut.
    """

    num_heads: int
    rows: int
    columns: int
    conv_channels: int
    conv_width: int
    inputs: tuple[tuple[int, ...], ...]
    num_pending: int
    dtype: str
    input_dtype: str
    max_norm: float = 0.0
    norm_tokens: int = 0


@struct.dataclass
class Recurrent:
    """The storage of a group of layers.

    `matrix [L, U, H, R, C]`, `conv [L, U, W - 1, X]` (oldest first), `pending_conv [L, U, J, X]`, and `pending`, arrays
    `[L, U, J, ...]`; both are `()` where nothing is ever pending.
    """

    matrix: Any
    conv: Any
    pending_conv: Any = ()
    pending: tuple = ()


def abstract(spec: RecurrentSpec, num_layers: int, num_slots: int) -> Recurrent:
    """Shapes and dtypes of a group's storage."""

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct((num_layers, num_slots, *shape), jnp.dtype(dtype))

    count = spec.num_pending
    return Recurrent(
        matrix=of(spec.dtype, spec.num_heads, spec.rows, spec.columns),
        conv=of(spec.input_dtype, spec.conv_width - 1, spec.conv_channels),
        pending_conv=of(spec.input_dtype, count, spec.conv_channels) if count else (),
        pending=tuple(of("float32", count, *shape) for shape in spec.inputs) if count else (),
    )


def logical_axes(storage: Recurrent) -> Recurrent:
    """The names of the axes of each array of a group's storage: every device has all of it."""
    return jax.tree.map(lambda leaf: (axes.LAYERS, axes.SLOTS, *(axes.STATE,) * (leaf.ndim - 2)), storage)


def read_slots(storage: Recurrent, slots) -> Recurrent:
    """What is in `slots [n]` of every layer, `[L, n, ...]`."""
    return jax.tree.map(lambda x: x[:, slots], storage)


def read_layers(storage: Recurrent, layers: tuple[int, ...], slots) -> Recurrent:
    """What is in `slots [n]` of some layers, `[len(layers), n, ...]`."""
    which = jnp.asarray(layers, jnp.int32)[:, None]
    return jax.tree.map(lambda x: x.at[which, slots].get(mode="clip"), storage)


def write_slots(storage: Recurrent, slots, content: Recurrent) -> Recurrent:
    """The storage with `slots [n]` overwritten by what `read_slots` gave."""
    return jax.tree.map(lambda x, new: x.at[:, slots].set(new, mode="promise_in_bounds"), storage, content)


def limit_slots(storage: Recurrent, slots, max_norm) -> Recurrent:
    """The storage with each head's matrix in `slots [n]`, which have nothing pending, scaled down to a Frobenius norm
    of `max_norm`; one below that stays as it is to the bit."""
    matrix = storage.matrix[:, slots].astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=(-2, -1), keepdims=True))
    limited = jnp.where(norm > max_norm, matrix * (max_norm / norm), matrix).astype(storage.matrix.dtype)
    return storage.replace(matrix=storage.matrix.at[:, slots].set(limited, mode="promise_in_bounds"))


def bytes_per_slot(spec: RecurrentSpec, num_layers: int) -> int:
    """What one slot of a group costs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract(spec, num_layers, 1)))
