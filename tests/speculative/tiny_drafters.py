# SPDX-License-Identifier: Apache-2.0
"""A proposer of each kind for a stored checkpoint: `make(golden) -> (proposer, its weights)`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from metrale_jax.speculative.draft_model import draft_model
from metrale_jax.speculative.eagle3 import Eagle3
from metrale_jax.speculative.mtp import Mtp
from metrale_jax.speculative.ngram import Ngram
from metrale_jax.speculative.self_draft import self_draft
from tests.speculative.head_problems import head_of, random_params
from tests.speculative.test_dflash import opened


def ngram(golden):
    """Prompt lookup that copies after a single token that agrees."""
    return Ngram(shortest=1), ()


def model(golden):
    """A draft model of the first half of the target's layers, and its weights: often right, often wrong."""
    config, half = golden.config, len(golden.config.layers) // 2
    params = golden.params.replace(layers=golden.params.layers[:half])
    return draft_model(config, replace(config, layers=config.layers[:half])), params


def own_layers(golden):
    """The model's first and last layers."""
    return self_draft(golden.config, (0, len(golden.config.layers) - 1)), ()


def mtp(golden):
    """A head of random weights with a vocabulary of its own."""
    config = head_of("mtp", golden.config, draft_vocab_size=50)
    return Mtp(config), random_params(config)


def eagle3(golden):
    """A head of random weights over the whole vocabulary."""
    config = head_of("eagle3", golden.config, capture=(0, 1, len(golden.config.layers)))
    return Eagle3(config), random_params(config)


def dflash(golden):
    """A block drafter of random weights, one of whose layers has a window."""
    with TemporaryDirectory() as directory:
        _, proposer, weights = opened(lambda name, block_size: golden, golden.name, Path(directory))
    return proposer, weights


DRAFTERS: Mapping[str, Callable] = MappingProxyType(
    {"ngram": ngram, "model": model, "self": own_layers, "mtp": mtp, "eagle3": eagle3, "dflash": dflash}
)
