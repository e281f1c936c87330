# SPDX-License-Identifier: Apache-2.0
"""Where proposers meet checkpoints: what drafts for a model is opened and its weights are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.place import Place, load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.errors import ConfigError, ModelNotFoundError
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.speculative.registry import Ask, Opened, open_proposer
from metrale_jax.state.formats import StateFormats


def opened_proposer(
    name: str | None,
    drafter: str | Path | None,
    num_drafts: int | None,
    checkpoint: Checkpoint,
    mesh: Mesh | None,
    cache_dir: Path,
    confidence: float = 0.0,
    layers: Sequence[int] | None = None,
) -> Opened | None:
    """The proposer called `name` for the model of `checkpoint`, None for none, its weights not yet read. `confidence`
    and `layers` are as in `Ask`.

    Raises `ConfigError` where the model, its drafter or several devices do not allow it, and for a drafter, a count or
    another option that nothing asks for.
    """
    if name is None:
        unset = {"drafter": drafter, "num_drafts": num_drafts, "draft_layer_ids": layers}
        unset["draft_confidence"] = confidence or None
        for option, value in unset.items():
            if value is not None:
                raise ConfigError(f"{option}={value!r} is for a proposer, and none is chosen; name one as proposer.")
        return None
    try:
        directory = None if drafter is None else resolve_model(str(drafter), cache_dir)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(str(error).replace("model=", "drafter=", 1)) from None

    def model():
        found = open_checkpoint(directory)
        return found.config, found.specs, found.source, found.ignored

    kept = None if layers is None else tuple(layers)
    ask = Ask(checkpoint.config, checkpoint.values, directory, num_drafts, model, confidence, kept)
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
