# SPDX-License-Identifier: Apache-2.0
"""`GgufSource`: a GGUF file's tensors under Hugging Face names, dequantised to float32 as they are read."""

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

from metrale_jax.checkpoint.gguf_blocks import can_dequantise, dequantise
from metrale_jax.checkpoint.gguf_file import GgufFile, GgufTensor
from metrale_jax.checkpoint.source import AbstractTensorSource, TensorInfo, aligned_empty, release_pages
from metrale_jax.core.errors import CheckpointError

Undo = Callable[[np.ndarray], np.ndarray]

# Formats that hold ordinary numbers and are returned as they lie.
_AS_STORED = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F64: "float64",
    GGMLQuantizationType.I8: "int8",
    GGMLQuantizationType.I16: "int16",
    GGMLQuantizationType.I32: "int32",
    GGMLQuantizationType.I64: "int64",
}


def gguf_names(wanted: Iterable[str], architecture: str, num_layers: int) -> dict[str, str]:
    """GGUF name of each wanted Hugging Face name, by the gguf package's table; names it lacks are left out."""
    by_name = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    if architecture not in by_name:
        raise CheckpointError(
            f"architecture={architecture!r} is not one that this version of gguf names tensors for. "
            "Upgrade the gguf package or use the safetensors checkpoint."
        )
    table = get_tensor_name_map(by_name[architecture], num_layers)
    found = {}
    for name in wanted:
        # `e_score_correction_bias` and its like are written with a dot there.
        spelling = name if name.endswith((".weight", ".bias")) else name.removesuffix("_bias") + ".bias"
        gguf_name = table.get_name(spelling, (".weight", ".bias")) or table.get_name(name)
        if gguf_name is not None:
            found[name] = gguf_name
    return found


class GgufSource(AbstractTensorSource):
    """Tensors of a GGUF file under the keys of `names`; the others stay visible under their GGUF names.

    `undo` holds, by Hugging Face name, what reverses the converter's change to the values; it keeps the shape.
    """

    def __init__(self, file: GgufFile, names: Mapping[str, str], undo: Mapping[str, Undo]):
        mapped = {hf_name: gguf_name for hf_name, gguf_name in names.items() if gguf_name in file.tensors}
        taken = set(mapped.values())
        self._names = mapped | {name: name for name in file.tensors if name not in taken}
        self._infos = {name: _info(file, gguf_name) for name, gguf_name in self._names.items()}
        self._undo = undo
        self._path = file.path
        self._lock = threading.Lock()
        self._file: GgufFile | None = file

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file, mapped or not."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32 (integers and float64 as stored), what the converter did to it undone."""
        file, gguf_name = self._open(name)
        tensor, raw = file.tensors[gguf_name], file.raw(gguf_name)
        array = _decoded(tensor, raw)
        return self._undo[name](array) if name in self._undo else array

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Nothing; `out` holds the tensor, dequantised in place where it can be, and the file's pages are let go."""
        file, gguf_name = self._open(name)
        tensor = file.tensors[gguf_name]
        if name in self._undo or out.dtype != np.float32 or tensor.quant_type in _AS_STORED:
            np.copyto(out, self.read(name), casting="unsafe")
        else:
            dequantise(file.raw(gguf_name), tensor.quant_type, out)
        release_pages(file.mapping, tensor.offset, tensor.offset + tensor.num_bytes)

    def location(self, name: str) -> str:
        """The file, with the name and format that the tensor has there."""
        gguf_name = self._names.get(name)
        return f"{self._path}: {gguf_name}" if gguf_name else str(self._path)

    def close(self) -> None:
        """Nothing; the file's mapping goes once no view of it is left."""
        with self._lock:
            self._file = None

    def _open(self, name: str) -> tuple[GgufFile, str]:
        with self._lock:
            file = self._file
        assert file is not None, f"{self._path} was closed before {name} was read"
        return file, self._names[name]


def _info(file: GgufFile, gguf_name: str) -> TensorInfo:
    tensor = file.tensors[gguf_name]
    if tensor.quant_type not in _AS_STORED and not can_dequantise(tensor.quant_type):
        raise CheckpointError(
            f"{file.path} stores tensor {gguf_name!r} as {tensor.type_name}, which cannot be dequantised. "
            "Use another quantisation of the model."
        )
    return TensorInfo(tensor.shape, _AS_STORED.get(tensor.quant_type, "float32"))


def _decoded(tensor: GgufTensor, raw: np.ndarray) -> np.ndarray:
    if tensor.quant_type in _AS_STORED:
        return raw.view(_AS_STORED[tensor.quant_type]).reshape(tensor.shape)
    out = aligned_empty(tensor.shape, np.float32)
    dequantise(raw, tensor.quant_type, out)
    return out
