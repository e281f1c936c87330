# SPDX-License-Identifier: Apache-2.0
"""Looking inside a model and changing what goes on there, with no more than its steps and params.

    rows = captured(steps, params, tokens, (0, 15, 30))     # [3, T, D]: the residual stream after so many layers
    logits = lens_logits(steps, params, rows[1])            # [T, V]: what the head makes of it there
    steered = with_edit(steps, AddVectors((15,)))           # steps of a model that adds a vector after 15 layers
    generate_tokens(steered, params.replace(edits=(vector,)), prompt, sampling)

The vector is an argument of the steered steps: with another one, or another strength, nothing is compiled again.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Array, Float

from metrale_jax.core.errors import ConfigError
from metrale_jax.evaluation import chunked
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.edit import AbstractEdit, AddVectors, RemoveDirections
from metrale_jax.steps.build import Steps

__all__ = ["AbstractEdit", "AddVectors", "RemoveDirections", "captured", "lens_logits", "with_edit"]


def captured(
    steps: Steps, params: DecoderParams, token_ids: Sequence[int], layers: Sequence[int]
) -> Float[np.ndarray, "n T D"]:
    """The residual stream of a whole sequence after so many layers as each of `layers` says, 0 for the embeddings.

    Raises `ConfigError` for a number of layers that the model has not, `RequestError` for too long a sequence.
    """
    parts = []
    for rows, count in chunked(steps, params, token_ids, "probe", captures=tuple(layers)):
        parts.append(np.stack([np.asarray(one)[:count] for one in rows]))
    return np.concatenate(parts, axis=1)


def lens_logits(steps: Steps, params: DecoderParams, rows: Float[Array, "R D"]) -> Float[np.ndarray, "R V"]:
    """Float32 logits of rows of the residual stream, as if no layer came after them."""
    return np.asarray(steps.run("lens", params, rows))


def with_edit(steps: Steps, edit: AbstractEdit | None) -> Steps:
    """Steps of the same model with `edit` between its layers, or with none; programs are its own.

    They take params whose `edits` are the edit's arrays. Raises `ConfigError` for layers that the model has not.
    """
    most = len(steps.model.config.layers)
    wrong = [layer for layer in (edit.layers if edit else ()) if not 0 <= layer <= most]
    if wrong:
        raise ConfigError(f"layers={wrong} are no numbers of layers from 0 to {most}; name some.")
    return Steps(replace(steps.model, edit=edit), steps.home, steps.on_compile)
