# SPDX-License-Identifier: Apache-2.0
"""JSON lines: files and standard streams, in and out."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from serving.batch.files import MAX_LINE_BYTES, BatchError, told, write_all

STANDARD = "-"
CHUNK_BYTES = 1 << 20
# What is read of a stream before work begins, to know it again.
HEAD_LINES, HEAD_BYTES = 1000, 1 << 20


class JsonlSource:
    """The lines of a file. `total` counts them; `identity` tells this content from any other."""

    def __init__(self, path: Path):
        self._path = path
        digest, self._size, ends, last = blake2b(digest_size=16), 0, 0, b"\n"
        with told("input", path, "name a file of JSON lines that can be read"), open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                self._size += len(chunk)
                ends += chunk.count(b"\n")
                last = chunk[-1:]
        self.total = ends + (last != b"\n")
        self.identity = {"bytes": self._size, "digest": digest.hexdigest()}

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers from 1, and lines without their ends; what was appended since the start is not read."""
        with told("input", self._path, "see that it stays readable"), open(self._path, "rb") as file:
            yield from _lines(file, self._size)


class StreamSource:
    """The lines of a stream, which can be read once. Its first lines stand for the whole in `identity`."""

    total = None

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._head: list[bytes] = []
        size, digest = 0, blake2b(digest_size=16)
        while len(self._head) < HEAD_LINES and size < HEAD_BYTES and (line := stream.readline(MAX_LINE_BYTES + 1)):
            self._head.append(line)
            size += len(line)
            digest.update(line)
        self.identity = {"bytes": size, "digest": digest.hexdigest()}

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers from 1, and lines without their ends. Call once."""
        yield from _lines(_Rejoined(self._head, self._stream), sys.maxsize)


class JsonlFile:
    """A file of output lines that is only ever appended to. Raises `BatchError` where it cannot be."""

    min_rows = 1

    def __init__(self, path: Path):
        self._path = path
        with told("output", path, "name a file in a writable directory"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.size = os.fstat(self._descriptor).st_size

    def recover(self) -> Iterator[int]:
        """Input line numbers of what is there. A torn end is cut off; a torn middle raises `BatchError`."""
        return (line for line, _, _ in self.places())

    def places(self) -> Iterator[tuple[int, int, int]]:
        """As `recover`, each input line number with the offset and length of its record."""
        whole, torn = 0, 0
        with told("output", self._path, "see that it stays readable"), open(self._path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _line_of(raw)
                if line is None:
                    torn = torn or number
                    continue
                if torn:
                    raise BatchError(
                        f"line {torn} of {str(self._path)!r} is none of this batch, though whole ones follow; remove "
                        "that line and run the command again."
                    )
                yield line, whole, len(raw)
                whole += len(raw)
        self.truncate(whole)

    def append(self, texts: list[bytes]) -> None:
        """Adds lines with one write; undone if it fails."""
        data = b"".join(texts)
        try:
            with told("output", self._path, "make room and run the command again, what is answered stays"):
                os.lseek(self._descriptor, self.size, os.SEEK_SET)
                write_all(self._descriptor, data)
        except BatchError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)

    def read(self, offset: int, length: int) -> bytes:
        """Part of what was written."""
        return os.pread(self._descriptor, length, offset)

    def truncate(self, size: int) -> None:
        """Forgets what lies past `size`."""
        with told("output", self._path, "name a file that can be changed"):
            os.ftruncate(self._descriptor, size)
        self.size = size

    def sync(self) -> None:
        """Waits until the disk holds it."""
        with told("output", self._path, "make room and run the command again, what is answered stays"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._descriptor)


class StreamTarget:
    """Output lines into a pipe or terminal: gone once written, so such a batch cannot be taken up again."""

    min_rows = 1

    def __init__(self, path: str):
        self._path = path
        with told("output", path, "name a file in a writable directory"):
            self._descriptor = os.dup(1) if path == STANDARD else os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def recover(self) -> Iterator[int]:
        """Nothing."""
        return iter(())

    def append(self, texts: list[bytes]) -> None:
        """Writes lines. Raises `BatchError`, or `BrokenPipeError` if nobody reads any more."""
        with told("output", self._path, "make room, or name a file, which can be taken up again"):
            write_all(self._descriptor, b"".join(texts))

    def sync(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Lets go of the stream."""
        os.close(self._descriptor)


def open_source(path: str) -> JsonlSource | StreamSource:
    """The input at `path`; `-` is standard input."""
    if path == STANDARD:
        return StreamSource(sys.stdin.buffer)
    if _is_stream(path):
        with told("input", path, "name a file of JSON lines that can be read"):
            return StreamSource(open(path, "rb"))
    return JsonlSource(Path(path))


def open_target(path: str) -> JsonlFile | StreamTarget:
    """The output at `path`; `-` is standard output."""
    return StreamTarget(path) if is_stream(path) else JsonlFile(Path(path))


def is_stream(path: str) -> bool:
    """Whether what is written to `path` cannot be read again."""
    return path == STANDARD or _is_stream(path)


def check_target(path: str) -> None:
    """Nothing. Raises `BatchError` if `path` is a directory."""
    if os.path.isdir(path):
        raise BatchError(f"output {path!r} is a directory, and JSON lines come out as one file; name a file in it.")


def is_empty(path: str) -> bool:
    """Whether there is nothing yet at `path`."""
    with told("output", path, "name a file in a writable directory"):
        return not os.path.exists(path) or os.path.getsize(path) == 0


def clear(path: str) -> None:
    """Removes what an earlier batch wrote to `path`."""
    with told("output", path, "name a file in a writable directory"):
        Path(path).unlink(missing_ok=True)


def _is_stream(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class _Rejoined:
    def __init__(self, head: list[bytes], stream: BinaryIO):
        self._head, self._stream = list(reversed(head)), stream

    def readline(self, limit: int) -> bytes:
        return self._head.pop() if self._head else self._stream.readline(limit)


def _lines(file: Any, size: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while size > 0 and (raw := file.readline(min(size, MAX_LINE_BYTES + 1))):
        number += 1
        size -= len(raw)
        line = raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            # What lies past the limit is passed over; the length alone says that the line is cut.
            raw = file.readline(min(size, MAX_LINE_BYTES + 1))
            size -= len(raw)
        if len(line) <= MAX_LINE_BYTES:
            line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        yield number, line


def _line_of(raw: bytes) -> int | None:
    if not raw.endswith(b"}\n"):
        return None
    try:
        line = json.loads(raw)["line"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return line if isinstance(line, int) and line > 0 else None
