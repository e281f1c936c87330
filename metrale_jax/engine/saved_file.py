# SPDX-License-Identifier: Apache-2.0
"""Saved sequences as files: arrays as they are, and a header that says what they are of and for which model.

A file is a safetensors file of raw bytes, whole or not there, with a digest of all that is in it. It holds data and no
code.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy the names of narrow floats
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from metrale_jax.core.errors import ConfigError

FORMAT = 1


class SavedFileGone(ConfigError):
    """A file that is not there."""


def write_saved(path: Path, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> int:
    """Bytes of the file now at `path`. `header` is plain JSON. Raises `ConfigError` for a path that cannot be
    written."""
    described = [{"shape": list(array.shape), "dtype": array.dtype.name} for array in arrays]
    raw = {f"{number:06}": _bytes_of(array) for number, array in enumerate(arrays)}
    text = json.dumps({"format": FORMAT, "arrays": described, **header})
    metadata = {"metrale": text, "sha256": _digest(text, raw.values())}
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        save_file(raw, temporary, metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"state file {str(path)!r} cannot be written ({error}); name another file.") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_saved(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays of what `write_saved` wrote. Raises `ConfigError` for a file that is none."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            text = metadata["metrale"]
            header = json.loads(text)
            if header.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            described = header.pop("arrays")
            raw = [file.get_tensor(f"{number:06}") for number in range(len(described))]
            if metadata["sha256"] != _digest(text, raw):
                raise ValueError("its digest is another")
            arrays = [_array_of(one, facts) for one, facts in zip(raw, described, strict=True)]
    except OSError as error:
        kind = SavedFileGone if isinstance(error, FileNotFoundError) else ConfigError
        raise kind(f"state file {str(path)!r} cannot be read ({error}); check the path.") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"state file {str(path)!r} is not what was saved ({error}); save it again.") from None
    return header, arrays


def _digest(text: str, raw: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for one in raw:
        digest.update(one)
    return digest.hexdigest()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _array_of(raw: np.ndarray, facts: Mapping[str, Any]) -> np.ndarray:
    return raw.view(np.dtype(facts["dtype"])).reshape(facts["shape"])
