# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: kept prefixes as files, a directory for each model, found again after a restart.

Several processes may share a directory. A file is whole or not there, says which model it is of, and may be deleted by
another process at any time, which is a miss. Whatever counts or deletes happens under a lock on the file `.lock`, which
holds the bytes of all files; what a killed process leaves uncounted is found with the next look at the directory.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG
from typing import Any, TextIO

import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.saved_file import SavedFileGone, read_saved, write_saved

LOG = logging.getLogger(__name__)
STATE = "state"
IDENTITY, LOCK = "model.json", ".lock"
SUFFIX = ".safetensors"
WRITING = ".writing-"
# What a process was writing so long ago it will never finish.
STALE_S = 3600
# Of a full store so much more is deleted, one part in so many, that the next files fit without another look at it.
SPARE, FEW_FILES = 16, 16


def block_kind(group: int) -> str:
    """The kind of an entry that is a block of the group."""
    return f"block{group}"


class DiskStore:
    """Files of at most `max_bytes` in `directory`, least recently used first out.

    They are of the model whose fingerprint is `model`: where the directory has another's, its files are deleted, and
    a process that still runs that model keeps nothing there from then on. Raises `ConfigError` for a directory that
    cannot be written. A file that cannot be written or read later is done without, and told of once.
    """

    def __init__(self, directory: Path, max_bytes: int, model: Mapping[str, str]):
        self._directory, self._max_bytes, self._model = directory, max_bytes, dict(model)
        self._tag = blake2b(json.dumps(self._model, sort_keys=True).encode(), digest_size=16).hexdigest()
        self._sizes: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._failed = self._lost = False
        self._stamp = (0, 0)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                if self._owner() != self._model:
                    for entry in self._files():
                        _unlink(entry)
                    self._claim()
                _write_total(lock, self._shrink())
        except OSError as error:
            raise ConfigError(
                f"disk cache {str(directory)!r} cannot be used ({error.strerror}); name a writable directory, or none."
            ) from None

    @property
    def num_files(self) -> int:
        """Files that are known to be here."""
        return len(self._sizes)

    def has(self, kind: str, digest: str) -> bool:
        """Whether there is such an entry, be it another process's; it counts as used now."""
        name = _name(kind, digest)
        if name not in self._sizes and not self._lost:
            self._look_for(name)
        if name in self._sizes:
            self._used[name] = time.time_ns()
        return name in self._sizes

    def put(self, kind: str, digest: str, arrays: Sequence[np.ndarray]) -> None:
        """Writes an entry, whole or not at all."""
        if self._lost:
            return
        name = _name(kind, digest)
        try:
            size = write_saved(self._directory / name, self._header(kind, digest), arrays)
            with self._locked() as lock:
                owner = self._owner()
                if owner is None:
                    self._claim()
                elif owner != self._model:
                    self._step_back(name)
                    return
                self._sizes[name], self._used[name] = size, time.time_ns()
                total = _read_total(lock) + size
                _write_total(lock, self._shrink() if total > self._max_bytes else total)
        except (ConfigError, OSError) as error:
            self._tell(error)

    def get(self, kind: str, digest: str) -> list[np.ndarray] | None:
        """The arrays of an entry, None where there is none or its file is damaged."""
        name = _name(kind, digest)
        if not self.has(kind, digest):
            return None
        path = self._directory / name
        try:
            header, arrays = read_saved(path)
            if header.get("model") != self._tag:
                self._forget(name)  # it is of the model that has the directory now, and stays
                return None
            if header != self._header(kind, digest):
                raise ConfigError(f"state file {str(path)!r} is another's; it is not used.")
        except SavedFileGone:
            self._forget(name)  # another process had no more room for it
            return None
        except ConfigError as error:
            self._tell(error)
            self._delete([name])
            self._forget(name)
            return None
        with suppress(OSError):
            os.utime(path)
        return arrays

    def clear(self) -> None:
        """Deletes all entries that this process knows of."""
        self._delete(list(self._sizes))

    def _look_for(self, name: str) -> None:
        try:
            facts = os.lstat(self._directory / name)
        except OSError:
            return
        if S_ISREG(facts.st_mode):
            self._sizes[name] = facts.st_size

    def _header(self, kind: str, digest: str) -> dict[str, str]:
        return {"kind": kind, "digest": digest, "model": self._tag}

    def _forget(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._used.pop(name, None)

    def _delete(self, names: Sequence[str]) -> None:
        try:
            with self._locked() as lock:
                ours = self._owner() == self._model
                for name in names:
                    self._forget(name)
                    if ours:
                        _unlink(self._directory / name)
                _write_total(lock, self._shrink())
        except OSError as error:
            self._tell(error)

    # Under the lock.

    @contextmanager
    def _locked(self) -> Iterator[TextIO]:
        with open(self._directory / LOCK, "a+") as file:
            flock(file, LOCK_EX)
            yield file

    def _owner(self) -> Any:
        """The model that the directory is said to be of; None where nothing is said."""
        identity = self._directory / IDENTITY
        try:
            facts = identity.stat()
            stamp = facts.st_ino, facts.st_mtime_ns
            if stamp == self._stamp:
                return self._model
            found = json.loads(identity.read_text())
        except (FileNotFoundError, ValueError):
            return None
        if found == self._model:
            self._stamp = stamp
        return found

    def _claim(self) -> None:
        identity = self._directory / IDENTITY
        beside = identity.with_name(f".{IDENTITY}{WRITING}{os.getpid()}")
        beside.write_text(json.dumps(self._model))
        os.replace(beside, identity)

    def _step_back(self, name: str) -> None:
        _unlink(self._directory / name)
        self._lost = True
        self._sizes.clear()
        self._used.clear()
        self._tell(ConfigError(f"{str(self._directory)!r} is another model's by now; nothing more is kept there."))

    def _files(self) -> Iterator[os.DirEntry]:
        """Entries that are files. What somebody was writing and never finished is deleted."""
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    yield entry
                elif WRITING in entry.name and _age_s(entry) > STALE_S:
                    _unlink(entry)

    def _shrink(self) -> int:
        """The bytes of all files, which fit, after the least recently used were deleted; what is here is known then."""
        found = []
        for entry in self._files():
            try:
                facts = entry.stat()
            except FileNotFoundError:
                continue
            found.append((max(facts.st_mtime_ns, self._used.get(entry.name, 0)), entry.name, facts.st_size))
        found.sort()
        total, spare = sum(size for _, _, size in found), self._max_bytes - self._max_bytes // SPARE
        too_many = total > self._max_bytes
        count = 0
        while too_many and count < len(found):
            if total <= self._max_bytes and (total <= spare or len(found) - count <= FEW_FILES):
                break
            _, name, size = found[count]
            _unlink(self._directory / name)
            total, count = total - size, count + 1
        self._sizes = {name: size for _, name, size in found[count:]}
        self._used = {name: used for used, name, _ in found[count:]}
        return total

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            LOG.warning("kept prefixes on disk: %s", error)
        self._failed = True


def _name(kind: str, digest: str) -> str:
    return f"{kind}-{digest}{SUFFIX}"


def _age_s(entry: os.DirEntry) -> float:
    """Seconds since a file was written to, 0 where it is not there any more."""
    try:
        return time.time() - entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _unlink(path: os.PathLike) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _read_total(lock: TextIO) -> int:
    lock.seek(0)
    text = lock.read().strip()
    return int(text) if text.isdecimal() else 0


def _write_total(lock: TextIO, total: int) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(str(total))
