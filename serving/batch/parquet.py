# SPDX-License-Identifier: Apache-2.0
"""Parquet: a file or a directory of files in, a directory of part files out."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from serving.batch.files import BatchError, publish, told

ROWS_READ = 1024
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
                        yield number, row_json(row)

    def _told(self):
        return told("input", self._path, "name Parquet that can be read", self._arrow.ArrowInvalid)


class ParquetParts:
    """A directory of part files, each put in its place whole."""

    min_rows = 4096

    def __init__(self, path: Path):
        _modules()
        self._path = path
        with told("output", path, "name a directory that can be written"):
            path.mkdir(exist_ok=True)
        self._next = 0

    def recover(self) -> Iterator[int]:
        """Input line numbers of all rows, once unfinished parts are removed."""
        for rows in part_columns(self._path, ["line"]):
            yield from (row["line"] for row in rows)
        numbers = [int(part.stem.removeprefix("part-")) for part in _parts(self._path)]
        self._next = max(numbers, default=-1) + 1

    def append(self, texts: list[bytes]) -> None:
        """Adds one part file."""
        write_part(self._path / f"part-{self._next:06d}.parquet", [json.loads(text) for text in texts])
        self._next += 1

    def sync(self) -> None:
        """Nothing to wait for: parts are synced as they are written."""

    def close(self) -> None:
        """Nothing to let go of."""


def write_part(part: Path, records: list[dict[str, Any]]) -> None:
    """Writes output records as a file that is there whole or not at all. Raises `BatchError`."""
    arrow, parquet = _modules()
    table = arrow.Table.from_pylist([_output_row(record) for record in records], schema=_schema(arrow))
    beside = part.with_name(f".{part.name}.tmp")
    with told("output", part, "make room and run the command again, what is answered stays", arrow.ArrowInvalid):
        with open(beside, "wb") as file:
            parquet.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        publish(beside, part)


def part_columns(directory: Path, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Rows of all parts of a directory, some columns of them, piece by piece, once unfinished parts are removed."""
    arrow, parquet = _modules()
    with told("output", directory, "see that its parts can be read", arrow.ArrowInvalid):
        for torn in directory.glob(".part-*.tmp"):
            torn.unlink()
        for part in _parts(directory):
            for batch in parquet.ParquetFile(part).iter_batches(columns=names):
                yield batch.to_pylist()


def row_json(row: dict[str, Any]) -> bytes:
    """A row as a line of the input: without nulls, a body of JSON text as an object."""
    present = _without_null(row)
    if isinstance(present.get("body"), str):
        # What is no JSON, or too deep, is told later, as a body that is no object.
        with suppress(ValueError, RecursionError):
            return json.dumps({**present, "body": json.loads(present["body"])}, default=str).encode()
    return json.dumps(present, default=str).encode()


def open_source(path: str) -> ParquetSource:
    """The input at `path`."""
    return ParquetSource(Path(path))


def open_target(path: str) -> ParquetParts:
    """The output in the directory `path`."""
    return ParquetParts(Path(path))


def is_stream(path: str) -> bool:
    """Never: parts are files."""
    return False


def check_target(path: str) -> None:
    """Nothing. Raises `BatchError` if `path` is a file."""
    if Path(path).is_file():
        raise BatchError(f"output {path!r} is a file, and Parquet comes out as a directory of parts; name another.")


def is_empty(path: str) -> bool:
    """Whether no part is there."""
    return not _parts(Path(path))


def clear(path: str) -> None:
    """Removes the parts."""
    with told("output", path, "name a directory that can be written"):
        for part in _parts(Path(path)):
            part.unlink()


def _parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("part-*.parquet"))


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
