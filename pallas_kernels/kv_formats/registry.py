# SPDX-License-Identifier: Apache-2.0
"""The formats by name. A new one is its file and a line here."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from pallas_kernels.kv_formats.format import KvFormat

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "float32": "pallas_kernels.kv_formats.plain:FLOAT32",
        "bfloat16": "pallas_kernels.kv_formats.plain:BFLOAT16",
        "float16": "pallas_kernels.kv_formats.plain:FLOAT16",
        "fp8_e4m3": "pallas_kernels.kv_formats.fp8:E4M3",
        "fp8_e5m2": "pallas_kernels.kv_formats.fp8:E5M2",
        "int8": "pallas_kernels.kv_formats.int8:INT8",
    }
)


def format_named(name: str) -> KvFormat:
    """The format of that name. Raises `ValueError` with the list if it is unknown."""
    if name not in FORMATS:
        raise ValueError(f"kv format {name!r} is unknown; use one of {sorted(FORMATS)}.")
    module, attribute = FORMATS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
