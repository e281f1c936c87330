# SPDX-License-Identifier: Apache-2.0
"""Tensors of the Open Inference Protocol as Python values and back, in both of the forms it has for them."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from serving.grpc.conversion_params import invalid, shortest
from serving.grpc.stubs import open_inference_pb2

# datatype -> (letter of `struct`, field of `InferTensorContents`)
_FORMS = MappingProxyType(
    {
        "BOOL": ("?", "bool_contents"),
        "INT8": ("b", "int_contents"),
        "INT16": ("h", "int_contents"),
        "INT32": ("i", "int_contents"),
        "INT64": ("q", "int64_contents"),
        "UINT8": ("B", "uint_contents"),
        "UINT16": ("H", "uint_contents"),
        "UINT32": ("I", "uint_contents"),
        "UINT64": ("Q", "uint64_contents"),
        "FP32": ("f", "fp32_contents"),
        "FP64": ("d", "fp64_contents"),
        "BYTES": ("", "bytes_contents"),
    }
)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Tensor:
    """Values in row-major order; those of BYTES are texts."""

    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def input_tensors(request: open_inference_pb2.ModelInferRequest) -> dict[str, Tensor]:
    """The request's inputs by name. Raises `ServiceError` (INVALID) for what is not as the protocol has it."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs; give one for each"
        )
    tensors: dict[str, Tensor] = {}
    for place, given in enumerate(request.inputs):
        if given.name in tensors:
            raise invalid(given.name, "is given twice; give it once")
        tensors[given.name] = _tensor(given, raw[place] if raw else None)
    return tensors


def put_tensor(response: open_inference_pb2.ModelInferResponse, name: str, tensor: Tensor, raw: bool) -> None:
    """Adds an output, as raw bytes or as typed contents."""
    output = response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
    letter, contents = _FORMS[tensor.datatype]
    is_text = tensor.datatype == "BYTES"
    values = [text.encode("utf-8", "replace") for text in tensor.values] if is_text else tensor.values
    if not raw:
        getattr(output.contents, contents).extend(values)
    elif is_text:
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(value)) + value for value in values))
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{letter}", *values))


def _tensor(given: open_inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name, shape = given.name, tuple(given.shape)
    if given.datatype not in _FORMS:
        raise invalid(name, f"is of datatype {given.datatype!r}; use one of {', '.join(_FORMS)}")
    if "shared_memory_region" in given.parameters:
        raise invalid(name, "is in shared memory, which is not served; send its contents")
    if raw is None:
        values: Sequence[Any] = getattr(given.contents, _FORMS[given.datatype][1])
    else:
        values = _unpacked(name, given.datatype, raw)
    if min(shape, default=1) < 0 or math.prod(shape) != len(values):
        raise invalid(name, f"has {len(values)} elements for shape {list(shape)}; give as many as the shape holds")
    if given.datatype == "BYTES":
        return Tensor(given.datatype, shape, tuple(_text(name, value) for value in values))
    if given.datatype == "FP32":
        return Tensor(given.datatype, shape, tuple(map(shortest, values)))
    return Tensor(given.datatype, shape, tuple(values))


def _unpacked(name: str, datatype: str, raw: bytes) -> Sequence[Any]:
    if datatype == "BYTES":
        return _unpacked_bytes(name, raw)
    letter = _FORMS[datatype][0]
    size = struct.calcsize(f"<{letter}")
    if len(raw) % size:
        raise invalid(name, f"has {len(raw)} bytes, no multiple of the {size} of a {datatype}; send whole elements")
    return struct.unpack(f"<{len(raw) // size}{letter}", raw)


def _unpacked_bytes(name: str, raw: bytes) -> list[bytes]:
    values, place = [], 0
    while place < len(raw):
        end = place + _LENGTH.size
        length = _LENGTH.unpack(raw[place:end])[0] if end <= len(raw) else len(raw)
        if end + length > len(raw):
            raise invalid(name, "ends within an element; send each after its length in 4 little-endian bytes")
        values.append(raw[end : end + length])
        place = end + length
    return values


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not UTF-8 ({error.reason} at byte {error.start}); send text in UTF-8") from error
