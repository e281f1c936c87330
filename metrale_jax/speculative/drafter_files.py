# SPDX-License-Identifier: Apache-2.0
"""A draft head as a directory: `config.json` and `model.safetensors`, the tensors under their published names, so that
an EAGLE-3 head from elsewhere opens too. `head_fields` says what the config holds."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import CheckpointError, ConfigError, shown
from metrale_jax.core.specs import ParamSpec, stacked_rows
from metrale_jax.models.decoder_specs import DecoderNames
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.speculative.drafter_config import table
from metrale_jax.speculative.head_fields import described_head, head_fields, read_head_config, target_facts
from metrale_jax.speculative.head_specs import IDS, distances_of_ids, head_specs, ids_of_distances
from metrale_jax.speculative.heads import HeadParams

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Tensors that published heads have beside those that are read: a mask that `d2t` says too, and the target's embeddings.
IGNORED = (r"t2d", r"(model\.)?embed_tokens\.weight", r".*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Drafter:
    """A draft head's directory, its weights not yet read. `target` says which model it is for; empty if it does not."""

    config: Any
    specs: HeadParams
    source: SafetensorsSource
    target: Mapping[str, Any]


def open_drafter(directory: Path, target: ModelConfig) -> Drafter:
    """The head that `directory` holds, for `target`. Raises `ConfigError` for one that is for another model, and
    `CheckpointError` for tensors that are missing, unexpected or of the wrong shape, or ids that the target lacks."""
    directory = Path(directory)
    raw = read_head_config(directory / CONFIG)
    facts = table(raw, "target")
    _check_target(raw, facts, directory, target)
    config, names = described_head(raw, target)
    source = SafetensorsSource(directory)
    try:
        specs = head_specs(config, names)
        load_plan(specs, source, IGNORED)
        if 0 < config.draft_vocab_size < config.vocab_size:
            _check_ids(config, source)
    except CheckpointError:
        source.close()
        raise
    return Drafter(config, specs, source, facts)


def write_drafter(directory: Path, config, params: HeadParams, target: ModelConfig, qk_norm: str = "none") -> None:
    """Nothing; `directory` holds the head for `target`, its weights in the dtype of the params. What it held before is
    replaced file by file, the weights first."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    specs = head_specs(config, DecoderNames(qk_norm=qk_norm))
    tensors = dict(_tensors(specs, params))
    if IDS in tensors:
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), np.asarray(params.token_ids))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / f"{WEIGHTS}.writing", metadata={"format": "pt"})
        os.replace(directory / f"{WEIGHTS}.writing", directory / WEIGHTS)
        text = json.dumps(head_fields(config, target, qk_norm), indent=2) + "\n"
        (directory / f"{CONFIG}.writing").write_text(text, encoding="utf-8")
        os.replace(directory / f"{CONFIG}.writing", directory / CONFIG)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be written: {error}. Free space or give another directory."
        ) from None


def _tensors(specs: HeadParams, params: HeadParams) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint, which the specs' transforms would make the params of again."""
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        array = np.asarray(array)
        if spec.transform is ids_of_distances:
            array = distances_of_ids(array)
        yield from _unstacked(spec, array)


def _unstacked(spec: ParamSpec, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    assert len(spec.sources) == 1 or spec.transform is stacked_rows, f"{spec.sources} cannot be told apart again"
    start = 0
    for item in spec.sources:
        rows = item.shape[0]
        yield item.name, np.ascontiguousarray(array[start : start + rows])
        start += rows


def _check_target(raw: RawConfig, facts: Mapping[str, Any], directory: Path, target: ModelConfig) -> None:
    sizes = {"hidden_size": target.hidden_dim, "vocab_size": target.vocab_size}
    expected = target_facts(target) if facts else sizes
    wrong = {
        name: found.get(name)
        for found, right in ((raw.values, sizes), (facts, expected if facts else {}))
        for name, value in right.items()
        if found.get(name) != value
    }
    if wrong:
        told = ", ".join(f"{name}={shown(value)}" for name, value in wrong.items())
        ours = ", ".join(f"{name}={value!r}" for name, value in expected.items())
        raise ConfigError(
            f"the drafter in {directory} was trained for a model of {told}, the target has {ours}; "
            "use the drafter of this model, or train one with metrale-jax train-drafter."
        )


def _check_ids(config, source: SafetensorsSource) -> None:
    distances = source.read(IDS)
    ids = distances + np.arange(len(distances))
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        raise CheckpointError(
            f"{source.location(IDS)} has {distances[outside[0]]} in row {outside[0]}, which makes token "
            f"{ids[outside[0]]}, and the target's go from 0 to {config.vocab_size - 1}; use the drafter of this model, "
            "or download it again."
        )
    tokens, counts = np.unique(ids, return_counts=True)
    if len(tokens) < len(ids):
        raise CheckpointError(
            f"{source.location(IDS)} makes token {tokens[counts.argmax()]} of {counts.max()} rows, and each has one; "
            "download the drafter again."
        )
