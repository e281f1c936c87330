# SPDX-License-Identifier: Apache-2.0
"""`Owner`: what one key has stored, and where it lies."""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from serving.core.errors import Kind, ServiceError
from serving.store.records import StoredBatch, StoredFile


@dataclass
class Owner:
    """The files and batches of one key by their ids, oldest first. `growing` are bytes of contents that are being
    written and are no files yet. Changed on the event loop only."""

    directory: Path
    files: dict[str, StoredFile] = field(default_factory=dict)
    batches: dict[str, StoredBatch] = field(default_factory=dict)
    growing: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All that it has on disk."""
        return sum(one.num_bytes for one in self.files.values()) + sum(self.growing.values())

    @property
    def unfinished(self) -> list[StoredBatch]:
        """Its batches that are under way, oldest first."""
        return [one for one in self.batches.values() if not one.is_finished]

    def file(self, file_id: str, field_name: str = "file_id") -> StoredFile:
        """The file of that id. Raises `ServiceError` (NOT_FOUND)."""
        return _found(self.files, "file", file_id, field_name)

    def batch(self, batch_id: str) -> StoredBatch:
        """The batch of that id. Raises `ServiceError` (NOT_FOUND)."""
        return _found(self.batches, "batch", batch_id, "batch_id")

    def user_of(self, file_id: str) -> StoredBatch | None:
        """A batch under way that reads the file."""
        return next((one for one in self.unfinished if one.input_file_id == file_id), None)

    def content(self, file_id: str) -> Path:
        """Where the content of a file lies; the id is one that was made here."""
        return self.directory / "files" / file_id

    def record(self, record: StoredFile | StoredBatch) -> Path:
        """Where a record lies."""
        folder = "files" if isinstance(record, StoredFile) else "batches"
        return self.directory / folder / f"{record.id}.json"


def directory_name(key_id: str) -> str:
    """The name of a key's directory."""
    return blake2b(key_id.encode(), digest_size=16, person=b"metrale owner").hexdigest()


def _found(known: dict, what: str, wanted: str, field_name: str):
    found = known.get(wanted)
    if found is None:
        raise ServiceError(Kind.NOT_FOUND, f"{what} {wanted[:80]!r} is not here; list what is.", field=field_name)
    return found
