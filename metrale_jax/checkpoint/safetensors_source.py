# SPDX-License-Identifier: Apache-2.0
"""`SafetensorsSource`: a directory of safetensors, sharded or not, or one file, as views of the mapped files."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from metrale_jax.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from metrale_jax.checkpoint.source import AbstractTensorSource, TensorInfo
from metrale_jax.core.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 8
_SHARD_COUNT = re.compile(r"-of-(\d+)\.safetensors$")


class SafetensorsSource(AbstractTensorSource):
    """The tensors of `path`: a file, or a directory with `model.safetensors` or an index and its shards.

    Opening maps each file once and checks headers and index against each other; no data is read until `read`.
    """

    def __init__(self, path: Path):
        path = Path(path)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist. Give a safetensors file or the directory that holds one.")
        files = _open_directory(path) if path.is_dir() else [open_safetensors(path)]
        self._path = path
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.infos:
                if name in self._file_of:
                    other = self._file_of[name].path.name
                    raise CheckpointError(
                        f"{path} holds tensor {name!r} in both {other} and {file.path.name}. Keep the files of one "
                        "model."
                    )
                self._file_of[name] = file
        self._infos = {name: file.infos[name] for name, file in self._file_of.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every shard."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file; its pages are read when touched."""
        return self._holder(name).view(name)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Nothing; `out` holds the tensor, and the file's pages that were read are let go."""
        self._holder(name).copy_into(name, out)

    def location(self, name: str) -> str:
        """The shard that holds the tensor, or the checkpoint's path if none does."""
        file = self._file_of.get(name)
        return f"{file.path if file else self._path}: {name}"

    def close(self) -> None:
        """Nothing; a file's mapping goes once no view of it is left."""
        self._file_of = {}

    def _holder(self, name: str) -> SafetensorsFile:
        file = self._file_of.get(name)
        assert file is not None, f"{self._path} was closed, or never held {name}"
        return file


def _open_directory(directory: Path) -> list[SafetensorsFile]:
    if (directory / _SINGLE).is_file():
        return [open_safetensors(directory / _SINGLE)]
    if (directory / _INDEX).is_file():
        return _open_shards(directory)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1 and not _SHARD_COUNT.search(found[0].name):
        return [open_safetensors(found[0])]
    if found:
        raise CheckpointError(
            f"{directory} holds {_listed(file.name for file in found)} but no {_INDEX}, which tells how they belong "
            "together. Download the index as well."
        )
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise CheckpointError(
            f"{directory} holds only pickled weights ({_listed(pickled)}), which are not loaded because they can run "
            "code. "
            "Convert them to safetensors: in transformers, load the model and call save_pretrained."
        )
    raise CheckpointError(f"{directory} holds no weights; {_SINGLE} or {_INDEX} was expected. Check the path.")


def _open_shards(directory: Path) -> list[SafetensorsFile]:
    weight_map = _weight_map(directory / _INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the {len(shards)} files that {_INDEX} names: {_listed(missing)}. "
            "Download them, or the whole model again."
        )
    counts = {match[1] for shard in shards if (match := _SHARD_COUNT.search(shard))}
    unlisted = [
        file.name
        for file in sorted(directory.glob("*.safetensors"))
        if file.name not in shards and (match := _SHARD_COUNT.search(file.name)) and match[1] in counts
    ]
    if unlisted:
        raise CheckpointError(
            f"{directory} holds {_listed(unlisted)}, which {_INDEX} does not name. Download the index again, or "
            "remove what "
            "does not belong to the model."
        )
    files = [open_safetensors(directory / shard) for shard in shards]
    for shard, file in zip(shards, files, strict=True):
        _check_against_index(file, {name for name, place in weight_map.items() if place == shard})
    return files


def _check_against_index(file: SafetensorsFile, promised: set[str]) -> None:
    absent = sorted(promised - set(file.infos))
    if absent:
        raise CheckpointError(
            f"{file.path} lacks {len(absent)} of the {len(promised)} tensors that {_INDEX} places there: "
            f"{_listed(absent)}. "
            "Download index and shard from the same revision."
        )
    unlisted = sorted(set(file.infos) - promised)
    if unlisted:
        raise CheckpointError(
            f"{file.path} holds {len(unlisted)} tensors that {_INDEX} does not place there: {_listed(unlisted)}. "
            "Download index and shard from the same revision."
        )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Download it again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor to file. Download it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise CheckpointError(
                f"{path} places tensor {name!r} in {shard!r}, which is not a file beside it. Download it again."
            )
    return weight_map


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
