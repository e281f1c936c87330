# SPDX-License-Identifier: Apache-2.0
"""`AbstractTensorSource`: named tensors on disk, whatever the file format."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from metrale_jax.core.errors import CheckpointError


@dataclass(frozen=True)
class TensorInfo:
    """Shape and numpy dtype name (`float32`, `bfloat16`, `int8` …) of the array that `read` returns."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * named_dtype(self.dtype).itemsize


class AbstractTensorSource(ABC):
    """Tensors under Hugging Face names. Reading is safe from several threads at once."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint; costs no reading of data."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor as an array: a read-only view of the file where the format allows, else a fresh array."""

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Nothing; `out` (C-contiguous, of the tensor's shape) holds its values, converted. Files may do it cheaper."""
        np.copyto(out, self.read(name), casting="unsafe")

    @abstractmethod
    def location(self, name: str) -> str:
        """Where the tensor lies, for an error message: the file and, where it differs, the name used there."""

    @abstractmethod
    def close(self) -> None:
        """Nothing; the source lets go of its files. Arrays that were read stay valid."""


def named_dtype(name: str) -> np.dtype:
    """The numpy dtype of a `TensorInfo.dtype`, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a 64-byte boundary, which JAX can adopt on a CPU without a copy."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def release_pages(mapping: mmap.mmap | bytes, start: int, stop: int) -> None:
    """Nothing; pages of a mapped file that were read for `start:stop` no longer count as this process's memory.

    They stay in the system's cache, and views of them stay valid: touched again, they are mapped again.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)  # a promise of Linux and macOS; elsewhere the pages stay
    first = start - start % mmap.PAGESIZE
    if advice is not None and isinstance(mapping, mmap.mmap) and stop > first:
        mapping.madvise(advice, first, stop - first)


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped read-only and never copied; empty bytes for an empty file."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path and its permissions."
        ) from error
