# SPDX-License-Identifier: Apache-2.0
"""Proposers to compile with, of the shapes that they have for a model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from metrale_jax.core.config import AttentionConfig, ModelConfig
from metrale_jax.models.proposer import AbstractProposer
from metrale_jax.speculative.eagle3 import Eagle3
from metrale_jax.speculative.head_specs import head_specs
from metrale_jax.speculative.heads import default_capture, head_config
from metrale_jax.speculative.mtp import Mtp
from metrale_jax.speculative.ngram import Ngram
from metrale_jax.speculative.self_draft import default_layers, self_draft

# Tokens that an EAGLE-3 head chooses from, as published ones do.
DRAFT_VOCABULARY = 32000
Made = tuple[AbstractProposer, object]


def _ngram(config: ModelConfig) -> Made:
    return Ngram(), ()


def _own_layers(config: ModelConfig) -> Made:
    return self_draft(config, default_layers(config)), ()


def _mtp(config: ModelConfig) -> Made:
    head = head_config("mtp", config, _attending(config), 0)
    return Mtp(head), head_specs(head)


def _eagle3(config: ModelConfig) -> Made:
    vocabulary, captures = min(DRAFT_VOCABULARY, config.vocab_size), default_capture(len(config.layers))
    head = head_config("eagle3", config, _attending(config), vocabulary, captures)
    return Eagle3(head), head_specs(head)


def _attending(config: ModelConfig):
    """The model's last layer of attention."""
    return next(one for one in reversed(config.layers) if isinstance(one.mixers[0], AttentionConfig))


DRAFTERS: Mapping[str, Callable[[ModelConfig], Made]] = MappingProxyType(
    {"ngram": _ngram, "self": _own_layers, "mtp": _mtp, "eagle3": _eagle3}
)
"""By the name of the proposer: it, and the specs of its weights."""
