# SPDX-License-Identifier: Apache-2.0
"""Edits of the residual stream: what a model does to its rows between layers, in every step that it runs.

An edit is the static, hashable half (`Model.edit`); its numbers are `DecoderParams.edits`, arguments of every step, so
that another vector or strength needs no other program.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.errors import ConfigError


class AbstractEdit(ABC):
    """Frozen and hashable."""

    layers: tuple[int, ...] = ()
    """After how many layers it changes rows, 0 for the embeddings."""

    @abstractmethod
    def apply(self, number: int, x: Float[Array, "T D"], batch: TokenBatch, arrays: Any) -> Float[Array, "T D"]:
        """The rows that go on after `number` layers, one of `layers`, in place of `x`.

        `arrays` are `DecoderParams.edits`. Called while a step is traced.
        """


@dataclass(frozen=True)
class AddVectors(AbstractEdit):
    """Adds `arrays[i]`, a vector `[D]`, to every row after `layers[i]` layers (Turner et al. 2023)."""

    layers: tuple[int, ...] = ()

    def apply(self, number, x, batch, arrays):
        for vector in _at(number, self.layers, arrays):
            x = x + vector.astype(x.dtype)
        return x


@dataclass(frozen=True)
class RemoveDirections(AbstractEdit):
    """Takes from every row after `layers[i]` layers its part along `arrays[i]`, a vector `[D]` (Arditi et al. 2024)."""

    layers: tuple[int, ...] = ()

    def apply(self, number, x, batch, arrays):
        for vector in _at(number, self.layers, arrays):
            wide, along = x.astype(jnp.float32), vector.astype(jnp.float32)
            along = along / jnp.linalg.norm(along)
            x = (wide - (wide @ along)[:, None] * along).astype(x.dtype)
        return x


def _at(number: int, layers: tuple[int, ...], arrays: Any) -> list:
    """The vectors of a layer."""
    if len(arrays) != len(layers):
        raise ConfigError(
            f"params.edits holds {len(arrays)} vectors and the model edits its rows after layers={layers}; give one "
            "for each: params.replace(edits=(vector, ...))."
        )
    return [jnp.asarray(vector) for layer, vector in zip(layers, arrays, strict=True) if layer == number]
