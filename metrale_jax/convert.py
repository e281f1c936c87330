# SPDX-License-Identifier: Apache-2.0
"""`convert`: a model as one directory of finished params, config and tokenizer, which opens like any other.

Weights are stored as the engine uses them, fused and in one dtype, in Orbax's format: nothing is dequantised or
joined when such a directory is loaded, and a mesh of devices can read it in shards.
"""

import argparse
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.orbax_store import save_params
from metrale_jax.checkpoint.place import load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.errors import CheckpointError, TextError
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.progress import Progress, TerminalProgress, silent
from metrale_jax.run_options import chosen_dtype
from metrale_jax.runtime import default_cache_dir


def convert_model(path: Path, directory: Path, dtype: str | None = None, progress: Progress = silent) -> str:
    """The dtype of the params that `directory`, which must be empty or absent, then holds with config and tokenizer.

    `path` is what `resolve_model` gave; `dtype` None keeps the checkpoint's own. A model without a tokenizer is
    converted without one. Raises `MetraleError`s; a directory that was not finished is removed.
    """
    directory = Path(directory)
    checkpoint = open_checkpoint(path)
    with closing(checkpoint.source):
        load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
        name = chosen_dtype(dtype, checkpoint.config.dtype)
        _make_empty(directory)
        finished = False
        try:
            params = load_params(
                checkpoint.specs,
                checkpoint.source,
                jnp.dtype(name),
                lambda array, spec: array,
                lambda done, total: progress("load", done, total),
            )
            _write_description(checkpoint, directory, name)
            save_params(directory, params, {"model": str(path), "dtype": name})
            finished = True
        finally:
            if not finished:
                shutil.rmtree(directory, ignore_errors=True)
    return name


def add_convert(commands: Any, epilog: str) -> None:
    """Nothing; the parser's `commands` have `convert`."""
    text = "write a model as one directory that loads without conversion"
    sub = commands.add_parser("convert", help=text, description=text, epilog=epilog)
    sub.set_defaults(command=_convert)
    sub.add_argument("--model", default="smollm2-135m", help="default smollm2-135m")
    sub.add_argument("--output", type=Path, required=True, help="a directory that is empty or does not exist")
    sub.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default the checkpoint's own")
    sub.add_argument("--cache-dir", type=Path, default=None, help="where models that come in parts are joined")
    sub.add_argument("--quiet", action="store_true", help="no progress")


def _convert(arguments: argparse.Namespace) -> int:
    path = resolve_model(arguments.model, arguments.cache_dir or default_cache_dir())
    shown = silent if arguments.quiet else TerminalProgress()
    dtype = convert_model(path, arguments.output, arguments.dtype, shown)
    print(f"{arguments.output} holds {arguments.model} in {dtype}")
    return 0


def _make_empty(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; give a directory that is empty or does not exist.")
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be written ({error.strerror}); give a directory that can be made and is empty."
        ) from None


def _write_description(checkpoint: Checkpoint, directory: Path, dtype: str) -> None:
    """Writes what is not weights: config, stop ids, tokenizer and chat templates."""
    stops = list(checkpoint.config.eos_token_ids)
    try:
        tokenizer = checkpoint.tokenizer()
        tokenizer.save(directory)
        stops += [token for token in tokenizer.eos_token_ids if token not in stops]
    except TextError:
        tokenizer = None  # served by token ids, as the model itself is
    _write_json(directory / "config.json", {**checkpoint.values, "dtype": dtype})
    _write_json(directory / "generation_config.json", {"eos_token_id": stops})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
