# SPDX-License-Identifier: Apache-2.0
"""Outlining: equal parts of a step traced once, and on some platforms compiled once."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Int

# XLA inlines every call unless told not to. Its CPU compiler emits the kernels of a function that is kept once for all
# its calls: thirty equal layers compile in the time of one. Elsewhere inlining is what optimisation needs.
KEPT: Mapping[str, str] = MappingProxyType({"cpu": "false"})


def outlined(function: Callable, platform: str) -> Callable:
    """`function` (hashable) as a call of its own in the program that traces it."""
    traced = _traced(function)
    keep = KEPT.get(platform)

    def call(*arguments):
        with set_xla_metadata(inlineable=keep) if keep else nullcontext():
            return traced(*arguments)

    return call


def first_index(platform: str, positions: Int[Array, " T"]) -> Int[Array, ""]:
    """Zero, to count calls from. Where calls are kept no compiler can tell that it is zero: a constant index would be
    carried into each call and make its code its own."""
    return jnp.minimum(positions[0], 0) if platform in KEPT else jnp.zeros((), jnp.int32)


@lru_cache(maxsize=256)
def _traced(function: Callable) -> Callable:
    @jax.jit
    def outline(*arguments):
        # The wish is for this call alone, not for every small function within it.
        with set_xla_metadata(inlineable=None):
            return function(*arguments)

    return outline
