# SPDX-License-Identifier: Apache-2.0
"""`open_safetensors`: one safetensors file, mapped, its header checked against the file byte for byte.

The format is eight bytes of header length, a JSON header, then the data, which the tensors tile without gap or
overlap.
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metrale_jax.checkpoint.source import TensorInfo, map_file, named_dtype, release_pages
from metrale_jax.core.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_AGAIN = "Download or save it again."
_COPY_BYTES = 4 << 20

# The format's dtype names -> numpy names (ml_dtypes included).
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "BOOL": "bool",
} | {f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class SafetensorsFile:
    """One file: what it holds, and where each tensor starts in `data`, the whole file as `mapping` maps it."""

    path: Path
    infos: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]
    data: np.ndarray
    mapping: mmap.mmap | bytes

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file."""
        info, start = self.infos[name], self.offsets[name]
        return self.data[start : start + info.num_bytes].view(named_dtype(info.dtype)).reshape(info.shape)

    def copy_into(self, name: str, out: np.ndarray) -> None:
        """Nothing; `out` (C-contiguous) holds the tensor, converted. Of the file no more than a chunk is in memory."""
        values, start = self.view(name).reshape(-1), self.offsets[name]
        step, flat = max(1, _COPY_BYTES // values.itemsize), out.reshape(-1)
        for at in range(0, values.size, step):
            chunk = values[at : at + step]
            np.copyto(flat[at : at + step], chunk, casting="unsafe")
            begin = start + at * values.itemsize
            release_pages(self.mapping, begin, begin + chunk.nbytes)


def open_safetensors(path: Path) -> SafetensorsFile:
    """The opened file. `CheckpointError` if it is cut short or its header is damaged or untrue."""
    data = map_file(path)
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} ({len(data)} bytes) is not a safetensors file: it must begin with a header length of at most "
            f"{_MAX_HEADER_BYTES}. {_AGAIN}"
        )
    start = 8 + header_bytes
    if start > len(data):
        raise CheckpointError(
            f"{path} is {len(data)} bytes, but its header ends at byte {start}; the file is cut short. {_AGAIN}"
        )
    infos, spans = {}, {}
    for name, entry in _header(path, data[8:start]).items():
        infos[name], spans[name] = _checked(path, name, entry)
    _check_tiling(path, spans, len(data) - start)
    offsets = {name: start + begin for name, (begin, _) in spans.items()}
    return SafetensorsFile(path, infos, offsets, np.frombuffer(data, np.uint8), data)


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{path} has {twice!r} twice in its header; the file is damaged. {_AGAIN}")
        return members

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a header that is not JSON ({error}); the file is damaged. {_AGAIN}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object; the file is damaged. {_AGAIN}")
    header.pop("__metadata__", None)
    return header


def _checked(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """Shape and dtype of one header entry with its span in the data, once they agree."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} describes tensor {name!r} as {str(entry)[:200]}, not with dtype, shape and two data_offsets. "
            f"{_AGAIN}"
        ) from error
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(
            f"{path} gives tensor {name!r} shape {list(shape)} and data_offsets [{begin}, {end}], which must be whole "
            f"numbers from 0 up. {_AGAIN}"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(
            f"{path} stores tensor {name!r} as {dtype!r}, which cannot be read; known are {', '.join(_DTYPES)}. "
            "Save the model in one of them."
        )
    expected = math.prod(shape) * named_dtype(_DTYPES[dtype]).itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path} gives tensor {name!r} ({dtype} {list(shape)}) {end - begin} bytes where it needs {expected}; the "
            f"header is untrue. {_AGAIN}"
        )
    return TensorInfo(shape, _DTYPES[dtype]), (begin, end)


def _check_tiling(path: Path, spans: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    position, before = 0, "the header"
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            fault = "overlaps" if begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{path} starts tensor {name!r} at data byte {begin} where {position} is next; it {fault} {before}. "
                f"{_AGAIN}"
            )
        position, before = end, repr(name)
    if position > data_bytes:
        late = next(name for name, (_, end) in sorted(spans.items(), key=lambda item: item[1]) if end > data_bytes)
        raise CheckpointError(
            f"{path} holds {data_bytes} bytes of data where its header promises {position}; it is cut short from "
            "tensor "
            f"{late!r} on. {_AGAIN}"
        )
    if position < data_bytes:
        raise CheckpointError(
            f"{path} holds {data_bytes} bytes of data where its header accounts for {position}; the rest belongs to no "
            f"tensor. {_AGAIN}"
        )
