# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights (OCP Microscaling Formats 1.0), read as the floating point that they stand for.

32 neighbouring inputs of a row share a power of two, stored as its exponent plus 127, and are 4-bit floats (E2M1), two
to a byte, the first in the low half.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.core.specs import Source

BLOCK = 32
BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# Beyond it a value is no finite bfloat16 and no finite float32.
LARGEST_EXPONENT = 125


def mxfp4_sources(name: str, shape: tuple[int, int, int]) -> tuple[Source, Source]:
    """Blocks and scales of a weight `[E, rows, columns]`. Raises `ConfigError` if rows are not whole blocks."""
    count, rows, columns = shape
    if columns % BLOCK:
        raise ConfigError(
            f"{name} has {columns} columns, not a multiple of {BLOCK}, which MXFP4 needs; correct the config."
        )
    blocks = (count, rows, columns // BLOCK)
    return (
        Source(f"{name}_blocks", (*blocks, BLOCK // 2), "uint8"),
        Source(f"{name}_scales", blocks, "uint8"),
    )


@dataclass(frozen=True)
class Mxfp4Rows:
    """A transform: blocks and scales of the weight `name` as its values in bfloat16, which holds all of them exactly,
    the rows then arranged by `arranged` if there is one."""

    name: str
    arranged: Callable[[np.ndarray], np.ndarray] | None = None

    def __call__(self, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """`[E, rows, columns]`. Raises `CheckpointError` for a scale that makes no finite number."""
        worst = int(scales.max(initial=0))
        if worst - BIAS > LARGEST_EXPONENT:
            raise CheckpointError(
                f"{self.name}_scales holds {worst}, above {LARGEST_EXPONENT + BIAS}, the largest that makes finite "
                "weights. The file is damaged; download it again."
            )
        if self.arranged is not None:
            blocks, scales = self.arranged(blocks), self.arranged(scales)
        out = np.empty((*scales.shape, BLOCK), ml_dtypes.bfloat16)
        for expert in range(len(out)):  # one at a time: in float32 a layer's experts are gigabytes
            codes = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1).reshape(*scales.shape[1:], BLOCK)
            out[expert] = np.ldexp(VALUES[codes], scales[expert].astype(np.int32)[..., None] - BIAS)
        return out.reshape(*out.shape[:2], -1)
