# SPDX-License-Identifier: Apache-2.0
"""File errors as sentences, and writes that are whole or undone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metrale_jax.core.errors import MetraleError

# A longer line is refused unread, so that one without an end cannot fill the memory.
MAX_LINE_BYTES = 64 << 20


class BatchError(MetraleError):
    """An input, output or state of a batch that cannot be used; what was answered so far is kept."""


@contextmanager
def told(what: str, path: str | Path, remedy: str, *others: type[Exception]) -> Iterator[None]:
    """Turns an `OSError` inside, or one of `others`, into a `BatchError` of one sentence.

    A reader that went away stays what it is.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, *others) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"{what} {str(path)!r} cannot be used ({reason}); {remedy}.") from error


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, with one call where the system takes it whole. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_whole(path: Path, data: bytes) -> None:
    """Puts `data` at `path` such that a reader finds all of it or what was there before. Raises `OSError`."""
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(beside, path)


def publish(beside: Path, path: Path) -> None:
    """Renames a synced file to its place and syncs the directory. Raises `OSError`."""
    os.replace(beside, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
