# SPDX-License-Identifier: Apache-2.0
"""`open_gguf`: the header of a GGUF file, checked against the file's size, with its metadata as plain values.

The gguf package's reader makes an array object of every vocabulary entry, which takes seconds; this one walks the
header once. The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from metrale_jax.checkpoint.source import map_file
from metrale_jax.core.errors import CheckpointError

_MAGIC = b"GGUF"
_MAX_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct and numpy letter; both use the same ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMPY = {"B": "u1", "b": "i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "f": "<f4", "?": "?"}
_NUMPY |= {"Q": "<u8", "q": "<i8", "d": "<f8"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: `shape` in numpy order (`[out, in]`), its format, and where its bytes lie."""

    shape: tuple[int, ...]
    quant_type: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """The format as people write it, such as `Q4_K`."""
        return self.quant_type.name


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file's metadata and tensor table; `data` is the whole file as `mapping` maps it, read-only."""

    path: Path
    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: np.ndarray
    mapping: mmap.mmap | bytes

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, a view `[num_bytes]` of the mapped file."""
        tensor = self.tensors[name]
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes]


def open_gguf(path: Path) -> GgufFile:
    """The opened file. `CheckpointError` if it is no GGUF, is cut short, or holds a tensor of unknown format."""
    path = Path(path)
    data = map_file(path)
    if data[:4] != _MAGIC:
        raise CheckpointError(
            f"{path} is not a GGUF file: it begins with {data[:4]!r} in place of {_MAGIC!r}. Download it again."
        )
    try:
        return _parse(path, data)
    except struct.error as error:
        raise CheckpointError(
            f"{path} is {len(data)} bytes and ends inside its GGUF header; it is cut short. Download it again."
        ) from error


def _parse(path: Path, data: mmap.mmap | bytes) -> GgufFile:
    cursor = _Cursor(path, data)
    version = cursor.scalar("I")
    if version not in (2, 3):
        order = " (big-endian)" if version and version % 65536 == 0 else ""
        raise CheckpointError(
            f"{path} has GGUF version {version}{order}; versions 2 and 3, little-endian, can be read. Convert it."
        )
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string("a metadata key")
        fields[key] = cursor.value(cursor.scalar("I"), key)
    num_parts = fields.get("split.count")
    if isinstance(num_parts, int) and num_parts > 1:
        raise CheckpointError(
            f"{path} is one of the {num_parts} parts of a model; one whole file can be read. "
            "Join them with llama-gguf-split --merge."
        )
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(
            f"{path} gives general.alignment={alignment!r}, which must be a positive number of bytes."
        )
    start = cursor.offset + -cursor.offset % alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path} lists tensor {name!r} twice. Download or convert it again.")
        tensors[name] = _located(path, name, shape, type_id, start + offset, len(data))
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} does not name its architecture in general.architecture; it cannot be loaded.")
    return GgufFile(path, architecture, fields, tensors, np.frombuffer(data, np.uint8), data)


def _entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    num_dimensions = cursor.scalar("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.path} gives tensor {name!r} {num_dimensions} dimensions, over the {_MAX_DIMENSIONS} of any GGUF; "
            "the header is damaged. Download it again."
        )
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _located(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int, file_bytes: int) -> GgufTensor:
    known = {member.value: member for member in GGML_QUANT_SIZES}
    if type_id not in known:
        raise CheckpointError(
            f"{path} stores tensor {name!r} in quantisation type {type_id}, which this version of gguf does not know. "
            "Upgrade the gguf package or use another quantisation."
        )
    block_elements, block_bytes = GGML_QUANT_SIZES[known[type_id]]
    row = shape[-1] if shape else 1
    if row % block_elements:
        raise CheckpointError(
            f"{path} gives tensor {name!r} rows of {row}, not a multiple of {block_elements} as "
            f"{known[type_id].name} needs; the header is damaged. Download it again."
        )
    num_bytes = math.prod(shape) // block_elements * block_bytes
    if offset + num_bytes > file_bytes:
        raise CheckpointError(
            f"{path} is {file_bytes} bytes, but its tensor {name!r} ends at byte {offset + num_bytes}; the file is cut "
            "short. Download it again."
        )
    return GgufTensor(shape, known[type_id], offset, num_bytes)


class _Cursor:
    """A read position in the header. Running past the end raises `struct.error`, which `open_gguf` explains."""

    def __init__(self, path: Path, data: mmap.mmap | bytes):
        self.path = path
        self.offset = len(_MAGIC)
        self._bytes = data

    def scalar(self, letter: str) -> Any:
        """The next number or boolean."""
        (value,) = struct.unpack_from("<" + letter, self._bytes, self.offset)
        self.offset += struct.calcsize("<" + letter)
        return value

    def string(self, what: str) -> str:
        """The next string."""
        return self._strings(1, what)[0]

    def value(self, type_id: int, key: str) -> Any:
        """The next value of GGUF type `type_id`: a number, boolean, string or list."""
        if type_id == _STRING:
            return self.string(key)
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id != _ARRAY:
            raise CheckpointError(
                f"{self.path} gives {key!r} the unknown value type {type_id}; it is damaged or too new."
            )
        element_id, count = self.scalar("I"), self.scalar("Q")
        if element_id == _STRING:
            return self._strings(count, key)
        if element_id == _ARRAY:
            return [self.value(_ARRAY, key) for _ in range(count)]
        return self._numbers(element_id, count, key)

    def _numbers(self, element_id: int, count: int, key: str) -> list:
        if element_id not in _SCALARS:
            raise CheckpointError(
                f"{self.path} gives {key!r} elements of unknown type {element_id}; it is damaged or too new."
            )
        dtype = np.dtype(_NUMPY[_SCALARS[element_id]])
        self._need(count * dtype.itemsize)
        values = np.frombuffer(self._bytes, dtype, count, self.offset).tolist()
        self.offset += count * dtype.itemsize
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        # A vocabulary has hundreds of thousands: everything the loop needs is local.
        data, offset, unpack = self._bytes, self.offset, struct.Struct("<Q").unpack_from
        self._need(8 * count)
        strings = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack(data, offset)[0]
                strings.append(data[start:offset].decode())
        except UnicodeDecodeError as error:
            self._need(offset - self.offset)  # a string that the end of the file cuts within a character
            raise CheckpointError(
                f"{self.path} has bytes in {key!r} that are not UTF-8 (entry {len(strings)}); it is damaged."
            ) from error
        self._need(offset - self.offset)
        self.offset = offset
        return strings

    def _need(self, num_bytes: int) -> None:
        if self.offset + num_bytes > len(self._bytes):
            raise struct.error(f"{num_bytes} bytes wanted at {self.offset}")
