# SPDX-License-Identifier: Apache-2.0
"""What is known of a file and of a batch, as records that go to disk as JSON."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

BATCH_INPUT, BATCH_OUTPUT = "batch", "batch_output"
# In the order in which a batch goes through them; cancelling may come after any of the first two.
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
FINISHED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class StoredFile:
    """A file: times are seconds since 1970, `name` and `purpose` what its sender says."""

    id: str
    name: str
    purpose: str
    num_bytes: int
    created: int
    expires: int


@dataclass(frozen=True)
class StoredBatch:
    """A batch of the key `key_id`. `moments` are seconds since 1970 at which it came to a status. `model` is the one
    that answers it, "" until that is known; `total` lines are to be answered, of which so many are. `keep_s` is how
    long its outputs are kept. `errors` say why it failed, each with the line at fault, if one is. `num_begun` is how
    often a server began to work on it and did not leave it in order."""

    id: str
    key_id: str
    endpoint: str
    input_file_id: str
    window: str
    created: int
    expires: int
    keep_s: int
    metadata: Mapping[str, str] | None = None
    status: str = UNFINISHED[0]
    moments: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[Mapping[str, Any], ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_begun: int = 1

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status in FINISHED

    @property
    def output_ids(self) -> tuple[str, str]:
        """The ids of its files of answers and of errors, the same from its beginning on."""
        stem = self.id.removeprefix("batch_")
        return f"file-{stem}-output", f"file-{stem}-error"

    def at(self, status: str, now: int, **changes: Any) -> "StoredBatch":
        """The batch once it has come to a status; when it first did stays."""
        moments = {**self.moments, status: self.moments.get(status, now)}
        return replace(self, status=status, moments=moments, **changes)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(16)


def as_json(record: StoredFile | StoredBatch) -> bytes:
    """The record as it goes to disk."""
    return json.dumps(asdict(record), indent=1).encode()


def file_of(text: bytes) -> StoredFile:
    """The file of a record. Raises `ValueError` or `TypeError` for what is none."""
    return StoredFile(**_known(StoredFile, text))


def batch_of(text: bytes) -> StoredBatch:
    """The batch of a record. Raises `ValueError` or `TypeError` for what is none."""
    known = _known(StoredBatch, text)
    return StoredBatch(**{**known, "errors": tuple(known.get("errors", ()))})


def _known(kind: type, text: bytes) -> dict[str, Any]:
    # What a later version wrote beside it is passed over.
    read, names = json.loads(text), {one.name for one in fields(kind)}
    return {name: value for name, value in read.items() if name in names}
