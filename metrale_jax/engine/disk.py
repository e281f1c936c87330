# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: kept prefixes as files, a directory for each model, found again after a restart."""

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.saved_file import read_saved, write_saved

LOG = logging.getLogger(__name__)
BLOCK, STATE = "block", "state"
IDENTITY = "model.json"
SUFFIX = ".safetensors"


class DiskStore:
    """Files of at most `max_bytes` in `directory`, least recently used first out.

    They are of the model whose fingerprint is `model`: where the directory has another's, its files are deleted.
    Raises `ConfigError` for a directory that cannot be written. A file that cannot be written or read later is done
    without, and told of once.
    """

    def __init__(self, directory: Path, max_bytes: int, model: Mapping[str, str]):
        self._directory, self._max_bytes = directory, max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._own(dict(model))
        except OSError as error:
            raise ConfigError(
                f"disk cache {str(directory)!r} cannot be used ({error.strerror}); name a writable directory, or none."
            ) from None
        self._shrink()

    def _own(self, model: dict[str, str]) -> None:
        identity = self._directory / IDENTITY
        try:
            same = json.loads(identity.read_text()) == model
        except (FileNotFoundError, ValueError):
            same = False
        stats = sorted((file.stat().st_mtime, file) for file in self._directory.glob(f"*{SUFFIX}"))
        for _, file in stats:
            if same:
                self._sizes[file.name] = file.stat().st_size
            else:
                file.unlink()
        if not same:
            beside = identity.with_name(f".{IDENTITY}.writing-{os.getpid()}")
            beside.write_text(json.dumps(model))
            os.replace(beside, identity)

    @property
    def num_files(self) -> int:
        """Files that are here."""
        return len(self._sizes)

    def has(self, kind: str, digest: str) -> bool:
        """Whether there is such an entry; it counts as used now."""
        name = _name(kind, digest)
        if name in self._sizes:
            self._sizes.move_to_end(name)
        return name in self._sizes

    def put(self, kind: str, digest: str, arrays: Sequence[np.ndarray]) -> None:
        """Writes an entry, whole or not at all."""
        name = _name(kind, digest)
        try:
            self._sizes[name] = write_saved(self._directory / name, {"kind": kind, "digest": digest}, arrays)
        except ConfigError as error:
            self._tell(error)
        self._shrink()

    def get(self, kind: str, digest: str) -> list[np.ndarray] | None:
        """The arrays of an entry, None where there is none or its file is damaged."""
        name = _name(kind, digest)
        if name not in self._sizes:
            return None
        path = self._directory / name
        try:
            header, arrays = read_saved(path)
            if header != {"kind": kind, "digest": digest}:
                raise ConfigError(f"state file {str(path)!r} is another's; it is not used.")
            os.utime(path)
            return arrays
        except (ConfigError, OSError) as error:
            self._tell(error)
            self._delete(name)
            return None

    def clear(self) -> None:
        """Deletes all entries."""
        for name in list(self._sizes):
            self._delete(name)

    def _shrink(self) -> None:
        while self._sizes and sum(self._sizes.values()) > self._max_bytes:
            self._delete(next(iter(self._sizes)))

    def _delete(self, name: str) -> None:
        del self._sizes[name]
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            LOG.warning("kept prefixes on disk: %s", error)
        self._failed = True


def _name(kind: str, digest: str) -> str:
    return f"{kind}-{digest}{SUFFIX}"
