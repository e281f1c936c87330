# SPDX-License-Identifier: Apache-2.0
"""`Store`: all owners, and the one thread that works on the disk for them."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from metrale_jax.core.errors import ConfigError
from serving.batch.files import write_whole
from serving.core.errors import Kind, ServiceError
from serving.store.owner import Owner, directory_name
from serving.store.records import StoredBatch, StoredFile, as_json, batch_of, file_of
from serving.store.settings import MIB, StoreSettings

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class Store:
    """Opened before the event loop has need of it; then all but `open` is for the loop. What is done on disk is done in
    the order in which it was asked for. `clock` gives seconds since 1970."""

    def __init__(self, settings: StoreSettings, clock: Callable[[], float]):
        self.settings, self._clock = settings, clock
        self._owners: dict[str, Owner] = {}
        self._lock = -1
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    @property
    def owners(self) -> tuple[Owner, ...]:
        """All that have something here."""
        return tuple(self._owners.values())

    def open(self) -> None:
        """Reads what is there. Raises `ConfigError` for a directory that cannot be used, or that another server has."""
        root = self.settings.directory
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for directory in sorted(path for path in root.iterdir() if path.is_dir()):
                self._owners[directory.name] = _read(directory)
        except BlockingIOError:
            raise ConfigError(f"data_dir={str(root)!r} is another server's; name a directory of its own.") from None
        except OSError as error:
            raise ConfigError(
                f"data_dir={str(root)!r} cannot be used ({error.strerror}); name a directory that can be written."
            ) from None

    async def close(self) -> None:
        """Ends the work on the disk, and lets another server have the directory."""
        await asyncio.to_thread(self._disk.shutdown)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def owner(self, key_id: str) -> Owner:
        """What the key has stored."""
        name = directory_name(key_id)
        return self._owners.setdefault(name, Owner(self.settings.directory / name))

    async def on_disk(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """What `work` gives, in the disk's thread. It is done even where who waits for it is cancelled."""
        running = asyncio.get_running_loop().run_in_executor(self._disk, partial(work, *arguments))
        return await asyncio.shield(running)

    async def put(self, owner: Owner, record: StoredFile | StoredBatch) -> None:
        """The record is there, on disk too. Raises `ServiceError` where the disk does not take it, though it is known
        here all the same."""
        known = owner.files if isinstance(record, StoredFile) else owner.batches
        known[record.id] = record
        with disk_faults():
            await self.on_disk(_write, owner.record(record), as_json(record))

    async def drop(self, owner: Owner, record: StoredFile | StoredBatch) -> None:
        """The record is gone, and its content. Raises `ServiceError` where the disk keeps it."""
        is_file = isinstance(record, StoredFile)
        (owner.files if is_file else owner.batches).pop(record.id, None)
        paths = [owner.record(record)] + ([owner.content(record.id)] if is_file else [])
        with disk_faults():
            await self.on_disk(_unlink, paths)

    def grow(self, owner: Owner, name: str, num_bytes: int) -> None:
        """Counts bytes that are about to be written. Raises `ServiceError` for more than the key may have."""
        limit = self.settings.max_owner_bytes
        if owner.num_bytes + num_bytes > limit:
            raise ServiceError(
                Kind.INVALID, f"files of this key are over the limit of {limit // MIB} MiB together; delete some."
            )
        owner.growing[name] = owner.growing.get(name, 0) + num_bytes

    async def sweep(self) -> None:
        """Drops what has been kept for long enough. A file that a batch reads waits for the batch."""
        now, keep_s = self.now, self.settings.keep_s
        for owner in self.owners:
            old = [one for one in owner.files.values() if one.expires <= now and owner.user_of(one.id) is None]
            old += [one for one in owner.batches.values() if one.is_finished and one.expires + keep_s <= now]
            for record in old:
                try:
                    await self.drop(owner, record)
                except ServiceError as error:
                    LOG.warning("what has expired stays: %s", error)


@contextmanager
def disk_faults() -> Iterator[None]:
    """Out of it an `OSError` comes as a `ServiceError`."""
    try:
        yield
    except OSError as error:
        LOG.error("the data directory cannot be written: %s", error)
        message = f"the server's disk takes nothing ({error.strerror}); try again later."
        raise ServiceError(Kind.UNAVAILABLE, message, retry_after_s=30.0) from error


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, text)


def _unlink(paths: list[Path]) -> None:
    # The record goes first: a content without one is swept away at the next start.
    for path in paths:
        path.unlink(missing_ok=True)


def _read(directory: Path) -> Owner:
    """The owner of a directory, cleared of what was half done when a server ended."""
    owner = Owner(directory)
    files = [file for file in _records(directory / "files", file_of) if owner.content(file.id).exists()]
    batches = _records(directory / "batches", batch_of)
    owner.files.update((file.id, file) for file in sorted(files, key=lambda one: (one.created, one.id)))
    owner.batches.update((batch.id, batch) for batch in sorted(batches, key=lambda one: (one.created, one.id)))
    under_way = {file_id for batch in owner.unfinished for file_id in batch.output_ids}
    for path in _entries(directory / "files"):
        if path.suffix == ".json" and path.stem in owner.files:
            continue
        if path.name in under_way and path.name not in owner.files:
            owner.growing[path.name] = path.stat().st_size
        elif path.name not in owner.files:
            path.unlink()
    return owner


def _records(folder: Path, read: Callable[[bytes], Any]) -> list[Any]:
    found = []
    for path in _entries(folder):
        if path.suffix == ".json":
            try:
                found.append(read(path.read_bytes()))
            except (ValueError, TypeError, AttributeError) as error:
                LOG.error("record %s is damaged and passed over: %s", path.name, error)
    return found


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
