# SPDX-License-Identifier: Apache-2.0
"""Who reads the figures of an implementation, or of a platform where none is named: `(row, target) -> figures`."""

from collections.abc import Mapping
from types import MappingProxyType

READERS: Mapping[str, str] = MappingProxyType(
    {
        "cuda": "benchmarks.static.cuda:figures",
        "mosaic_gpu": "benchmarks.static.mosaic_gpu:figures",
        "tpu": "benchmarks.static.tpu:figures",
    }
)
