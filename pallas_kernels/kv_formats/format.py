# SPDX-License-Identifier: Apache-2.0
"""`KvFormat`: what a number format of keys and values has to say for itself."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KvFormat:
    """A row of `H` numbers is `decode(codes) * scale`, with one scale a row, or without any.

    `dtype` is that of the codes, which are as many as the numbers. `largest` is the largest magnitude that a code can
    have, 0 where rows take no scale. `encode(rows, dtype)` gives the codes of float32 rows that are scaled already;
    `decode(codes, dtype)` gives numbers of `dtype` (float32, bfloat16 or float16), without the scale: a kernel
    multiplies it into logits and weights, of which there are fewer.
    """

    dtype: str
    largest: float
    encode: Callable
    decode: Callable

    @property
    def scaled(self) -> bool:
        """Whether rows carry scales."""
        return self.largest > 0
