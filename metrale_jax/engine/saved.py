# SPDX-License-Identifier: Apache-2.0
"""`SavedState`: what a sequence holds in the pool, copied out of it; `SwapSpace`: where that waits to be put back."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.saved_file import read_saved, write_saved

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedState:
    """The state of a sequence after `seq_len` tokens, on the host.

    `held[g]` are the logical blocks of group g that it had, without those that a window has left; `blocks` and `slot`
    are pytrees of numpy arrays as the device gave them: of each group `[L, n, ...]`, `n = len(held[g])`, and of the
    slot `[L, 1, ...]`, or `()` where no layer keeps state in slots. `regime` is what the keys depend on beside tokens.
    `for_all`: any sequence that begins with the same tokens may go on from it, and it is worth keeping in the pool.
    """

    seq_len: int
    known_len: int
    regime: Hashable
    held: tuple[tuple[int, ...], ...]
    blocks: Any
    slot: Any
    num_bytes: int
    for_all: bool = False


class SwapFiles:
    """Saved states in files of a directory of their own below `directory`, which goes with this object.

    `device` knows a state's arrays by their order (`arrays_of`, `as_state`).
    """

    def __init__(self, directory: Path, device: Any):
        self._device = device
        self._failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._own = Path(mkdtemp(prefix="swap-", dir=directory))
        except OSError as error:
            raise ConfigError(
                f"swap directory {str(directory)!r} cannot be written ({error.strerror}); name a writable one, or none."
            ) from None
        finalize(self, rmtree, self._own, ignore_errors=True)

    def write(self, request_id: int, saved: SavedState) -> bool:
        """Whether it was written; a disk that cannot take it is told of once."""
        try:
            write_saved(self._path(request_id), {}, self._device.arrays_of((saved.blocks, saved.slot)))
            return True
        except ConfigError as error:
            if not self._failed:
                LOG.warning("preempted requests are run again: %s", error)
            self._failed = True
            return False

    def read(self, request_id: int, saved: SavedState) -> SavedState:
        """The state with its content. Raises `ConfigError` where it cannot be read."""
        path = self._path(request_id)
        _, arrays = read_saved(path)
        try:
            blocks, slot = self._device.as_state(max(map(len, saved.held)), arrays)
        except ValueError as error:
            raise ConfigError(f"state file {str(path)!r} is not what was saved ({error}).") from None
        return replace(saved, blocks=blocks, slot=slot)

    def delete(self, request_id: int) -> None:
        """Removes a file."""
        self._path(request_id).unlink(missing_ok=True)

    def _path(self, request_id: int) -> Path:
        return self._own / f"{request_id}.safetensors"


class SwapSpace:
    """Room for `max_bytes` of saved states in memory, by request id, and for any number in `files`, if there are some:
    states of preempted requests, and of those that were saved by another process and are to go on here."""

    def __init__(self, max_bytes: int, files: SwapFiles | None = None):
        self.max_bytes, self._files = max_bytes, files
        self._saved: dict[int, SavedState] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def takes_any(self) -> bool:
        """Whether there is room for any state at all."""
        return self.max_bytes > 0 or self._files is not None

    def put(self, request_id: int, saved: SavedState, anyhow: bool = False) -> bool:
        """Whether it was taken: there was room, or it has to be."""
        self.drop(request_id)
        if self.num_bytes + saved.num_bytes > self.max_bytes and not anyhow:
            if self._files is None or not self._files.write(request_id, saved):
                return False
            saved = replace(saved, blocks=None, slot=None, num_bytes=0)
        self._saved[request_id] = saved
        self.num_bytes += saved.num_bytes
        return True

    def get(self, request_id: int) -> SavedState | None:
        """What was put, which stays; of one in a file without its content."""
        return self._saved.get(request_id)

    def peek(self, request_id: int) -> SavedState | None:
        """What was put, with its content, which stays. Raises `ConfigError` where its file cannot be read."""
        saved = self._saved.get(request_id)
        return self._files.read(request_id, saved) if saved is not None and saved.blocks is None else saved

    def take(self, request_id: int) -> SavedState | None:
        """What was put, with its content, which is no longer here. Raises `ConfigError` where its file cannot be
        read."""
        try:
            return self.peek(request_id)
        finally:
            self.drop(request_id)

    def drop(self, request_id: int) -> None:
        """Forgets what was put, if anything was."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.num_bytes -= saved.num_bytes
            if saved.blocks is None:
                self._files.delete(request_id)

    def clear(self) -> None:
        """Forgets all."""
        for request_id in list(self._saved):
            self.drop(request_id)


def bytes_of(arrays: list[np.ndarray]) -> int:
    """Their bytes together."""
    return sum(array.nbytes for array in arrays)
