# SPDX-License-Identifier: Apache-2.0
"""Who reads the figures of a platform: `(row, target) -> figures`."""

from collections.abc import Mapping
from types import MappingProxyType

READERS: Mapping[str, str] = MappingProxyType(
    {"cuda": "benchmarks.static.cuda:figures", "tpu": "benchmarks.static.tpu:figures"}
)
