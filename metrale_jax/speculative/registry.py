# SPDX-License-Identifier: Apache-2.0
"""Which file opens which proposer: a literal table of lazy imports, one line a proposer."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metrale_jax.checkpoint.source import AbstractTensorSource
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.models.proposer import AbstractProposer

# More drafts of a row than this no proposer makes.
MOST_DRAFTS = 64


@dataclass(frozen=True)
class Ask:
    """What a proposer is opened for: the `target` and the fields of its config.json, `directory`, which holds the
    drafter where it has weights of its own, and how many tokens at most are drafted at a time, None for the proposer's
    own choice. `model()` gives config, weight specs, source and ignored tensors of a whole model in `directory`.
    `confidence` is the least probability that a head drafts on at, and `layers` are those that a model keeps to draft
    for itself, None for its own choice."""

    target: ModelConfig
    values: Mapping[str, Any]
    directory: Path | None
    num_drafts: int | None
    model: Callable[[], tuple[ModelConfig, Any, AbstractTensorSource, tuple[str, ...]]]
    confidence: float = 0.0
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Opened:
    """A proposer, the tree of its weights' specs (`()` for none), where they are read from (None: the target's own
    checkpoint), the tensors there that it does without, how many tokens it drafts at most, and which of `confidence`
    and `layers` it heeds."""

    proposer: AbstractProposer
    num_drafts: int
    specs: Any = ()
    source: AbstractTensorSource | None = None
    ignored: tuple[str, ...] = (r".*",)
    heeds: tuple[str, ...] = ()


PROPOSERS: Mapping[str, str] = MappingProxyType(
    {
        "ngram": "ngram",
        "self": "self_draft",
        "model": "draft_model",
        "mtp": "mtp",
        "eagle3": "eagle3",
        "dflash": "dflash",
    }
)


def open_proposer(name: str, ask: Ask) -> Opened:
    """The proposer called `name`. Raises `ConfigError` for one unknown, or that the target or the directory does not
    serve."""
    if name not in PROPOSERS:
        raise ConfigError(f"proposer={name!r} is not one of {', '.join(PROPOSERS)}; choose one, or None.")
    count = ask.num_drafts
    if count is not None and not 1 <= count <= MOST_DRAFTS:
        raise ConfigError(f"num_drafts={count} is not from 1 to {MOST_DRAFTS}; give a number of tokens in between.")
    if not 0 <= ask.confidence < 1:
        raise ConfigError(f"draft_confidence={ask.confidence} is no probability; give one from 0 to below 1.")
    opened = importlib.import_module(f"metrale_jax.speculative.{PROPOSERS[name]}").open_proposer(ask)
    for field, option in (("confidence", "draft_confidence"), ("layers", "draft_layer_ids")):
        value = getattr(ask, field)
        if value != getattr(Ask, field) and field not in opened.heeds:
            raise ConfigError(f"{option}={value!r} is given, and proposer={name!r} has no use for it; leave it out.")
    return opened


def no_directory(name: str, ask: Ask) -> None:
    """Nothing. Raises `ConfigError` where a drafter is given to a proposer without weights."""
    if ask.directory is not None:
        raise ConfigError(
            f"drafter={str(ask.directory)!r} is given, and proposer={name!r} has no weights of its own; leave it out."
        )


def wanted_directory(name: str, ask: Ask, what: str) -> Path:
    """The directory of the drafter. Raises `ConfigError` where none is given."""
    if ask.directory is None:
        raise ConfigError(f"proposer={name!r} needs {what}; give it as drafter.")
    return ask.directory


def draft_widths(num_drafts: int) -> tuple[int, ...]:
    """The widths of steps that draft up to `num_drafts` tokens a row: halves of halves, ascending."""
    widths = {num_drafts}
    while (num_drafts := num_drafts // 2) > 0:
        widths.add(num_drafts)
    return tuple(sorted(widths))
