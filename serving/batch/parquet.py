# SPDX-License-Identifier: Apache-2.0
"""Parquet: a file or a directory of files in, a directory of part files out."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from serving.batch.files import BatchError, publish, told

ROWS_READ = 1024
PART = re.compile(r"part-(\d{6})\.parquet")
# Columns that hold whatever was asked for, as JSON.
AS_JSON = ("choices", "logprobs", "response")


class ParquetSource:
    """The rows of a file, or of the `*.parquet` files of a directory in the order of their names.

    Columns are the fields of an input line; null is a field that is not there. `body` may be a struct or JSON text.
    """

    def __init__(self, path: Path):
        self._arrow, self._parquet = _modules()
        self._path = path
        with self._told():
            self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
            digests = []
            for file in self._files:
                with open(file, "rb") as opened:
                    digests.append(file_digest(opened, "blake2b").hexdigest()[:32])
            self.total = sum(self._parquet.read_metadata(file).num_rows for file in self._files)
        self.identity = {"rows": self.total, "digests": digests}

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Row numbers from 1, and rows as JSON."""
        number = 0
        with self._told():
            for file in self._files:
                for batch in self._parquet.ParquetFile(file).iter_batches(batch_size=ROWS_READ):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, _row_json(row)

    def _told(self):
        return told("input", self._path, "name Parquet that can be read", self._arrow.ArrowInvalid)


class ParquetParts:
    """A directory of part files, each put in its place whole."""

    min_rows = 4096

    def __init__(self, path: Path):
        self._arrow, self._parquet = _modules()
        self._path = path
        with self._told():
            path.mkdir(exist_ok=True)
        self._next = 0

    def recover(self) -> Iterator[int]:
        """Input line numbers of all rows, once unfinished parts are removed."""
        with self._told():
            for torn in self._path.glob(".part-*.tmp"):
                torn.unlink()
            for part in _parts(self._path):
                self._next = int(PART.fullmatch(part.name)[1]) + 1
                for batch in self._parquet.ParquetFile(part).iter_batches(columns=["line"]):
                    yield from batch.column("line").to_pylist()

    def append(self, texts: list[bytes]) -> None:
        """Adds one part file."""
        rows = [_output_row(json.loads(text)) for text in texts]
        table = self._arrow.Table.from_pylist(rows, schema=_schema(self._arrow))
        part = self._path / f"part-{self._next:06d}.parquet"
        beside = self._path / f".{part.name}.tmp"
        with self._told():
            with open(beside, "wb") as file:
                self._parquet.write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
            publish(beside, part)
        self._next += 1

    def sync(self) -> None:
        """Nothing to wait for: parts are synced as they are written."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _told(self):
        remedy = "make room or name another directory, and run the command again"
        return told("output", self._path, remedy, self._arrow.ArrowInvalid)


def open_source(path: str) -> ParquetSource:
    """The input at `path`."""
    return ParquetSource(Path(path))


def open_target(path: str) -> ParquetParts:
    """The output in the directory `path`."""
    return ParquetParts(Path(path))


def is_stream(path: str) -> bool:
    """Never: parts are files."""
    return False


def is_empty(path: str) -> bool:
    """Whether no part is there. Raises `BatchError` if `path` is a file."""
    if Path(path).is_file():
        raise BatchError(f"output {path!r} is a file, and Parquet comes out as a directory of parts; name another.")
    return not _parts(Path(path))


def clear(path: str) -> None:
    """Removes the parts."""
    with told("output", path, "name a directory that can be written"):
        for part in _parts(Path(path)):
            part.unlink()


def _parts(directory: Path) -> list[Path]:
    return sorted(part for part in directory.glob("part-*.parquet") if PART.fullmatch(part.name))


def _modules():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BatchError(
            f"Parquet needs pyarrow, which cannot be imported ({error}); pip install 'metrale-jax[parquet]', or use "
            "JSON lines."
        ) from None
    return pyarrow, pyarrow.parquet


def _row_json(row: dict[str, Any]) -> bytes:
    present = _without_null(row)
    if isinstance(present.get("body"), str):
        with suppress(ValueError):  # what is no JSON is told later, as a body that is no object
            present["body"] = json.loads(present["body"])
    return json.dumps(present, default=str).encode()


def _without_null(value: Any) -> Any:
    # A struct column gives every row every field.
    if isinstance(value, dict):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _output_row(record: dict[str, Any]) -> dict[str, Any]:
    row = {**record, **{name: json.dumps(record[name]) for name in AS_JSON if record.get(name) is not None}}
    if record.get("id") is not None:
        row["id"] = str(record["id"])
    if record.get("custom_id") is not None:
        row["custom_id"] = str(record["custom_id"])
    return row


def _schema(arrow):
    counts = [(name, arrow.int64()) for name in ("prompt_tokens", "cached_tokens", "generated_tokens")]
    return arrow.schema(
        [
            ("line", arrow.int64()),
            ("id", arrow.string()),
            ("custom_id", arrow.string()),
            ("text", arrow.string()),
            ("token_ids", arrow.list_(arrow.int32())),
            ("finish_reason", arrow.string()),
            ("seed", arrow.uint64()),
            ("usage", arrow.struct(counts)),
            *((name, arrow.string()) for name in AS_JSON),
            ("error", arrow.struct([("code", arrow.string()), ("message", arrow.string())])),
        ]
    )
