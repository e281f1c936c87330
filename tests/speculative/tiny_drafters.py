# SPDX-License-Identifier: Apache-2.0
"""A proposer of each kind for a stored checkpoint: `make(golden, num_drafts) -> (proposer, its weights)`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from metrale_jax.speculative.ngram import Ngram


def ngram(golden, num_drafts: int):
    """Prompt lookup that copies after a single token that agrees."""
    return Ngram(shortest=1), ()


DRAFTERS: Mapping[str, Callable] = MappingProxyType({"ngram": ngram})
