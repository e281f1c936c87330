# SPDX-License-Identifier: Apache-2.0
"""File formats by suffix.

A format is a module with `open_source(path)` and `open_target(path)`, and with `is_stream`, `check_target`,
`is_empty` and `clear` for the path of an output.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

FORMATS = {".jsonl": "serving.batch.jsonl", ".parquet": "serving.batch.parquet"}
# Standard streams and other names hold JSON lines.
OTHERWISE = ".jsonl"


class Source(Protocol):
    """An input: `total` rows, or None if only reading it tells; `identity` is the same for the same content only."""

    total: int | None
    identity: dict[str, Any]

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Rows as JSON with their numbers, from 1; an empty one gets no answer."""


class Target(Protocol):
    """An output that grows by `min_rows` records or more at a time, each of them whole or not there at all."""

    min_rows: int

    def recover(self) -> Iterator[int]:
        """Input line numbers of all records that are there, once torn ends are cleaned up."""

    def append(self, texts: list[bytes]) -> None:
        """Adds records, given as lines of JSON."""

    def sync(self) -> None:
        """Waits until the disk holds it."""

    def close(self) -> None:
        """Lets go of it."""


def format_of(path: str) -> ModuleType:
    """The module that reads and writes `path`."""
    return importlib.import_module(FORMATS.get(Path(path).suffix.lower(), FORMATS[OTHERWISE]))
