# SPDX-License-Identifier: Apache-2.0
"""The directories of a run: whose they are, and that one run at a time works in them."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.speculative.drafter_files import CONFIG, WEIGHTS

LOCK, OWNER = "training.lock", "model.json"


@contextmanager
def claimed(*directories: Path) -> Iterator[None]:
    """A context in which no other process trains in any of `directories`. Raises `ConfigError` where one does."""
    with ExitStack() as stack:
        for directory in dict.fromkeys(path.resolve() for path in directories):
            path = directory / LOCK
            file = stack.enter_context(path.open("a"))
            if not _locked(file, path):
                raise ConfigError(
                    f"another process trains in {directory}; wait for its end, or give another directory."
                )
            stack.callback(path.unlink, missing_ok=True)
        yield


def _locked(file: IO[str], path: Path) -> bool:
    """Whether the lock is had of the file that `path` names, which who had it before may have removed by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def refuse_others(directory: Path) -> None:
    """Nothing. Raises `ConfigError` where a head would replace a model or drafter from elsewhere in `directory`."""
    config, weights = directory / CONFIG, sorted(directory.glob("*.safetensors"))
    if not config.exists() and not weights:
        return
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        ours = isinstance(values, dict) and "drafter" in values and "target" in values
    except (OSError, ValueError):
        ours = False
    if not ours or any(path.name != WEIGHTS for path in weights):
        held = ", ".join(path.name for path in (config, *weights) if path.exists())
        raise ConfigError(f"{directory} holds a model or drafter from elsewhere ({held}); give another directory.")


def settle_owner(directory: Path, owner: Mapping[str, object], kept: list[str]) -> None:
    """Nothing; `directory` says that what it keeps is of `owner`, a few plain values that tell models and questions
    apart. Raises `ConfigError` where that is another's, and where it has files of the names `kept` and no owner."""
    path = directory / OWNER
    wanted = dict(owner)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give another data directory.") from None
    if found is None and any((directory / name).exists() for name in kept):
        raise ConfigError(
            f"{directory} does not say whose answers it holds ({OWNER} is missing); give another directory."
        )
    if found is not None and found != wanted:
        known = found if isinstance(found, dict) else {}
        other = ", ".join(
            f"{name}={known.get(name)!r}, here {value!r}" for name, value in wanted.items() if known.get(name) != value
        )
        raise ConfigError(f"{directory} holds what was made with {other or repr(found)}; give another data directory.")
    if found is None:
        (directory / f"{OWNER}.writing").write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        os.replace(directory / f"{OWNER}.writing", path)
