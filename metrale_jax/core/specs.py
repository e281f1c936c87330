# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`: the one description of a weight from which loading, sharding and random init all follow."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Transform = Callable[..., np.ndarray]


def identity(array: np.ndarray) -> np.ndarray:
    """The single source as it stands."""
    return array


def stacked_rows(*arrays: np.ndarray) -> np.ndarray:
    """The sources one under the other along axis 0: `[a, D], [b, D] -> [a + b, D]`, or vectors end to end.

    A spec whose shape is that of the rows in equal runs, `[E, rows, D]`, gets them so.
    """
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint: its Hugging Face name and the shape it must have there.

    `dtype` is the integer type of packed codes, which a transform gets as they are; empty for any floating point.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class Part:
    """One of the projections that a parameter's rows fuse: `units` that no shard may cut (heads, channels), each of
    `width` rows."""

    units: int
    width: int


@dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and origin of one parameter. A leaf of a tree of specs that mirrors the params.

    `axes` names each dimension (see `sharding/axes.py`); `sources` are the checkpoint tensors that `transform` (a
    pure numpy function of as many arrays) turns into an array of `shape`. `keep_float32` exempts the parameter from
    the run's dtype, and `integer` ones are int32 whatever that is. `parts` says what the rows of a fused projection
    are, in order, so that `sharding.fused` can lay them out by shard; `()` is for rows that may be cut anywhere.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    sources: tuple[Source, ...]
    transform: Transform = identity
    keep_float32: bool = False
    parts: tuple[Part, ...] = ()
    integer: bool = False

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (
            f"{self.sources}: {self.shape} has not one axis name each: {self.axes}"
        )

    def dtype_in(self, run: str) -> str:
        """The dtype that the parameter has in a run in the dtype called `run`."""
        return "int32" if self.integer else "float32" if self.keep_float32 else run
