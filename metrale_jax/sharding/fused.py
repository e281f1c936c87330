# SPDX-License-Identifier: Apache-2.0
"""Fused projections laid out by shard.

The rows of `qkv` are the query heads', then the keys', then the values'. Cut into equal runs, they would put queries on
one device and keys on another. Laid out by shard they are the first shard's queries, keys and values, then the
second's: each run is a smaller `qkv` of its own. Key and value heads that are fewer than the shards are there several
times, beside the query heads that read them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from metrale_jax.core.specs import ParamSpec, Part


@dataclass(frozen=True)
class ByShard:
    """A transform: that of `transform`, its rows then laid out for `num_shards`."""

    transform: Callable[..., np.ndarray]
    parts: tuple[Part, ...]
    num_shards: int

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The fused rows, shard after shard."""
        fused = self.transform(*arrays)
        ends = np.cumsum([part.units * part.width for part in self.parts])
        pieces = zip(self.parts, np.split(fused, ends[:-1]), strict=True)
        runs = [self._run(part, piece) for part, piece in pieces]
        return np.concatenate(runs, axis=1).reshape(-1, *fused.shape[1:])

    def _run(self, part: Part, piece: np.ndarray) -> np.ndarray:
        units = piece.reshape(part.units, part.width, *piece.shape[1:])
        units = np.repeat(units, _copies(part, self.num_shards), axis=0)
        return units.reshape(self.num_shards, -1, *piece.shape[1:])


def by_shard(spec: ParamSpec, num_shards: int) -> ParamSpec:
    """`spec` with the rows of its parts laid out for `num_shards`; itself if it has none or there is one shard.

    Units of a part divide among the shards, or the shards among the units.
    """
    if num_shards == 1 or not spec.parts:
        return spec
    rows = sum(part.units * part.width * _copies(part, num_shards) for part in spec.parts)
    transform = ByShard(spec.transform, spec.parts, num_shards)
    return replace(spec, shape=(rows, *spec.shape[1:]), transform=transform)


def _copies(part: Part, num_shards: int) -> int:
    if part.units % num_shards == 0:
        return 1
    assert num_shards % part.units == 0, f"{part.units} units and {num_shards} shards do not divide"
    return num_shards // part.units
