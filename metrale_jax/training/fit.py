# SPDX-License-Identifier: Apache-2.0
"""The loop that trains a head: rows of texts in an order that the seed gives, checkpoints, and measurements."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.checkpoint.orbax_store import restore_metadata, restore_params, save_params
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.speculative.heads import HeadParams
from metrale_jax.training.pack import Packed
from metrale_jax.training.programs import Programs, Progress
from metrale_jax.training.unroll import Texts

CHECKPOINTS = "checkpoints"
REPORT_STEPS = 20


@dataclass(frozen=True)
class Lessons:
    """What a head learns from: rows of texts, the target's rows for them (final hidden ones first), the table of
    embeddings as the head takes them, and the target's head rows: of the draft vocabulary, and all of them."""

    packed: Packed
    rows: Sequence[np.ndarray]
    table: np.ndarray
    scorer: Any
    whole_scorer: Any

    def texts(self, packed: Packed) -> Texts:
        """The arrays of some rows of texts."""
        hidden, *captured = (array[packed.places].astype(np.float32) for array in self.rows)
        embeds = self.table[packed.tokens].astype(np.float32)
        return Texts(packed.tokens, packed.positions, packed.owners, packed.asked, hidden, tuple(captured), embeds)


@dataclass(frozen=True)
class Course:
    """What of a run is not the optimiser's: the seed of its order, rows of texts a step, and how often it is saved.
    `settings` are what a run must have been begun with to be gone on with."""

    seed: int
    step_rows: int
    save_seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)


Report = Callable[[int, float, Sequence[float]], None]


def fit(
    programs: Programs, params: HeadParams, lessons: Lessons, course: Course, directory: Path, report: Report
) -> tuple[HeadParams, list[dict[str, Any]]]:
    """The trained head, and the run's history: losses and shares of right guesses, each the mean of `REPORT_STEPS`.

    `directory` holds the run's checkpoints; a run that was stopped goes on from its last one, and gives what it would
    have given. `report(step, loss, right)` is called where history gets an entry.
    """
    progress, history = resumed(programs.begun(params), course, directory)
    recent: list[tuple[float, np.ndarray]] = []
    saved, total = time.monotonic(), programs.recipe.num_steps
    for step in range(int(progress.step), total):
        which = order(course, len(lessons.packed.tokens), step)
        texts, turns = lessons.texts(lessons.packed.rows(which)), programs.recipe.turns(step)
        progress, loss, right = programs.step(progress, texts, lessons.scorer, turns)
        recent.append((float(loss), np.asarray(right)))
        if not np.isfinite(recent[-1][0]):
            raise ConfigError(f"the loss is {recent[-1][0]} at step {step}; train with a lower learning_rate.")
        last = step + 1 == total
        if (step + 1) % REPORT_STEPS == 0 or last:
            losses, rights = zip(*recent, strict=True)
            history.append(
                {"step": step + 1, "loss": float(np.mean(losses)), "right": np.mean(rights, axis=0).tolist()}
            )
            report(step + 1, history[-1]["loss"], history[-1]["right"])
            recent = []
            # Saved where history has no loose end, so that a run which goes on has the same one.
            if not last and time.monotonic() - saved >= course.save_seconds:
                save(progress, history, course, directory)
                saved = time.monotonic()
    weights = progress.weights
    return params.replace(**{name: getattr(weights, name) for name in TRAINED}), history


TRAINED = ("embed_norm", "hidden_norm", "fc", "layer", "final_norm")


def order(course: Course, num_rows: int, step: int) -> np.ndarray:
    """Which rows step `step` learns from: each epoch has all of them, in an order of its own."""
    first = step * course.step_rows
    found = []
    for index in range(first, first + course.step_rows):
        epoch, place = divmod(index, num_rows)
        found.append(np.random.default_rng([course.seed, 1, epoch]).permutation(num_rows)[place])
    return np.asarray(found)


def save(progress: Progress, history: list, course: Course, directory: Path) -> None:
    """Nothing; the run can go on from here. What was saved before is removed once this is whole."""
    step = int(progress.step)
    path = directory / CHECKPOINTS / f"{step:07d}"
    if path.exists():
        shutil.rmtree(path)
    save_params(path, progress, {"step": step, "history": history, "settings": dict(course.settings)})
    for other in (directory / CHECKPOINTS).iterdir():
        if other != path:
            shutil.rmtree(other)


def resumed(begun: Progress, course: Course, directory: Path) -> tuple[Progress, list[dict[str, Any]]]:
    """The run that `directory` holds a checkpoint of, and its history; or `begun`, where there is none that is whole.

    Raises `ConfigError` for a run with other settings.
    """
    places = sorted((directory / CHECKPOINTS).iterdir(), reverse=True) if (directory / CHECKPOINTS).exists() else []
    for path in places:
        try:
            found = restore_metadata(path)
        except CheckpointError:
            continue  # the save was cut short; the one before it is still there
        settings = dict(course.settings)
        wrong = [f"{name}={value!r}" for name, value in found["settings"].items() if settings.get(name) != value]
        if wrong or settings.keys() != found["settings"].keys():
            raise ConfigError(
                f"{directory} holds an unfinished run with {', '.join(wrong) or 'other settings'}; give the settings "
                "that it was begun with, or another directory."
            )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), begun)
        return restore_params(path, shapes), list(found["history"])
    return begun, []


def measure(
    programs: Programs, params: HeadParams, lessons: Lessons, temperature: float, seed: int, rows: int
) -> dict[str, Any]:
    """How guesses fare on up to `rows` rows of texts that were not learnt from: at each turn the share that is right
    of those whose turns before were, and the mean of tokens a step that this gives, the target's own included."""
    tried = right = 0
    for row in range(min(rows, len(lessons.packed.tokens))):
        texts = lessons.texts(lessons.packed.rows(np.asarray([row])))
        key = jax.random.fold_in(jax.random.key(seed), row)
        draws = (jnp.float32(temperature), key) if temperature else ()
        found = programs.measure(params, texts, lessons.whole_scorer, draws)
        tried, right = tried + np.asarray(found.tried), right + np.asarray(found.right)
    # Chains that began too near a text's end to reach a turn are left out of it, so lengths come of the shares.
    shares = right / np.maximum(tried, 1)
    return {
        "temperature": temperature,
        "chains": int(tried[0]),
        "right": [round(float(share), 4) for share in shares],
        "tokens_per_step": [round(float(1 + np.cumprod(shares)[: turn + 1].sum()), 4) for turn in range(len(shares))],
    }
