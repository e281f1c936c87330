# SPDX-License-Identifier: Apache-2.0
"""`StoreSettings`: where files and batches are kept, how much and for how long."""

from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
DAY_S = 24 * 3600


@dataclass(frozen=True)
class StoreSettings:
    """A file has up to `max_file_bytes`, all of a key's together up to `max_owner_bytes`, those that batches of the key
    write included. Files, and batches that are finished, are kept for `keep_s`. Of one key there are up to `max_files`,
    `max_batches`, of which `max_unfinished` under way, and `max_uploads` that are being sent."""

    directory: Path
    max_file_bytes: int = 200 * MIB
    max_owner_bytes: int = 4096 * MIB
    keep_s: int = 30 * DAY_S
    max_files: int = 1000
    max_batches: int = 1000
    max_unfinished: int = 64
    max_uploads: int = 4
