# SPDX-License-Identifier: Apache-2.0
"""Heads as proposers ask for them: out of a directory."""

from collections.abc import Callable

from metrale_jax.core.errors import ConfigError
from metrale_jax.speculative.drafter_files import IGNORED, open_drafter
from metrale_jax.speculative.heads import HEADS, KINDS
from metrale_jax.speculative.registry import Ask, Opened, wanted_directory

# Of chains that guess on from guesses, the fourth is seldom right.
DRAFTS = 3


def opened_head(kind: str, ask: Ask, proposer: Callable) -> Opened:
    """The head of a `kind` that the directory holds; `proposer(config, confidence)` drafts with it.

    Raises `ConfigError` for one of another kind or for another model, and where no directory is given.
    """
    directory = wanted_directory(kind, ask, "a head that was trained for the model")
    drafter = open_drafter(directory, ask.target)
    if not isinstance(drafter.config, KINDS[kind]):
        drafter.source.close()
        found = HEADS[type(drafter.config)].name
        raise ConfigError(
            f"the drafter in {directory} is a head for proposer={found!r}, and proposer={kind!r} is chosen; choose "
            f"{found!r}, or give another drafter."
        )
    made = proposer(drafter.config, ask.confidence)
    return Opened(made, ask.num_drafts or DRAFTS, drafter.specs, drafter.source, IGNORED, heeds=("confidence",))
