# SPDX-License-Identifier: Apache-2.0
"""Where proposers meet checkpoints: what drafts for a model is opened and its weights are loaded."""

from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.place import Place, load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.errors import ConfigError, ModelNotFoundError
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.run_options import RunOptions
from metrale_jax.speculative.registry import Ask, Opened, open_proposer
from metrale_jax.state.formats import StateFormats

# What is chosen of a proposer beside its name.
DRAFT_OPTIONS = ("drafter", "num_drafts", "draft_confidence", "draft_layer_ids")


def opened_proposer(options: RunOptions, checkpoint: Checkpoint, mesh: Mesh | None, cache_dir: Path) -> Opened | None:
    """The proposer that `options` name for the model of `checkpoint`, None for none, its weights not yet read.

    Raises `ConfigError` where the model, its drafter or several devices do not allow it, and for a drafter, a count or
    another option that nothing asks for.
    """
    name, drafter = options.proposer, options.drafter
    if name is None:
        for option in DRAFT_OPTIONS:
            value = getattr(options, option)
            if value != getattr(RunOptions, option):
                raise ConfigError(f"{option}={value!r} is for a proposer, and none is chosen; name one as proposer.")
        return None
    try:
        directory = None if drafter is None else resolve_model(str(drafter), cache_dir)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(str(error).replace("model=", "drafter=", 1)) from None

    def model():
        found = open_checkpoint(directory)
        return found.config, found.specs, found.source, found.ignored

    layers = None if options.draft_layer_ids is None else tuple(options.draft_layer_ids)
    ask = Ask(
        checkpoint.config, checkpoint.values, directory, options.num_drafts, model, options.draft_confidence, layers
    )
    opened = open_proposer(name, ask)
    proposer = opened.proposer
    if mesh is not None and (proposer.one_device or proposer.layer_states(StateFormats("float32"))):
        raise ConfigError(
            f"proposer={name!r} drafts with layers, which {mesh.size} devices cannot share; use proposer='ngram', or "
            "one device."
        )
    return opened


def load_drafter(opened: Opened, checkpoint: Checkpoint, dtype: np.dtype, place: Place) -> Any:
    """The weights of a proposer for the model of `checkpoint`, as `load_params` gives them."""
    own = opened.source is not None
    source = opened.source if own else checkpoint.source
    try:
        load_plan(opened.specs, source, opened.ignored)
        return load_params(opened.specs, source, dtype, place)
    finally:
        if own:
            source.close()
