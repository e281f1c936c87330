# SPDX-License-Identifier: Apache-2.0
"""`undone_lines`: what an input still asks for, each line read, told from those before it and made into a job."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serving.batch.done import SeenIds
from serving.batch.formats import Source
from serving.batch.records import Origin
from serving.batch.requests import BadLine, decoded, origin_of

# Makes a job of an origin, the record and the number of bytes of the line. Raises `BadLine`.
Make = Callable[[Origin, Mapping[str, Any], int], Any]


@dataclass(frozen=True)
class Line:
    """A line that is not done: its `job`, or the `fault` that makes it none; an empty one has neither."""

    number: int
    job: Any = None
    fault: BadLine | None = None


def undone_lines(source: Source, done: Container[int], ids: SeenIds, make: Make) -> Iterator[Line]:
    """The lines that `done` lacks, in order. Those that are done are read too, for their ids."""
    for number, raw in source.rows():
        line = _line(number, raw, done, ids, make)
        if line is not None:
            yield line


def _line(number: int, raw: bytes, done: Container[int], ids: SeenIds, make: Make) -> Line | None:
    if not raw:
        return None if number in done else Line(number)
    try:
        record = decoded(number, raw)
        origin = origin_of(number, record)
        _check_first(origin, ids)
        return None if number in done else Line(number, make(origin, record, len(raw)))
    except BadLine as fault:
        return None if number in done else Line(number, fault=fault)


def _check_first(origin: Origin, ids: SeenIds) -> None:
    if origin.key is None:
        return
    first = ids.first_line(origin.spelling, origin.line)
    if first != origin.line:
        message = f"{origin.key_name}={origin.key!r} is taken by line {first}; give each line its own."
        raise BadLine("duplicate_id", message, Origin(origin.line, origin.openai))
