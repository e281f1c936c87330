# SPDX-License-Identifier: Apache-2.0
"""`Upload`: a content on its way to becoming a file."""

import os

from serving.batch.files import write_all
from serving.core.errors import Kind, ServiceError
from serving.store.owner import Owner
from serving.store.records import StoredFile, new_id
from serving.store.store import Store, disk_faults


class Upload:
    """A content that is written piece by piece. It ends by `keep` or by `drop`; what is left otherwise is gone at the
    next start."""

    def __init__(self, store: Store, owner: Owner):
        settings = store.settings
        if sum(not name.endswith(("-output", "-error")) for name in owner.growing) >= settings.max_uploads:
            raise ServiceError(
                Kind.EXHAUSTED,
                f"{settings.max_uploads} files of this key are being sent, which is the limit; send one after another.",
                retry_after_s=5.0,
            )
        if len(owner.files) >= settings.max_files:
            raise ServiceError(
                Kind.INVALID, f"{len(owner.files)} files of this key are here, which is the limit; delete some."
            )
        self._store, self._owner = store, owner
        self._descriptor = -1
        self.id, self.num_bytes = new_id("file-"), 0
        owner.growing[self.id] = 0

    async def write(self, data: bytes) -> None:
        """Adds to it. Raises `ServiceError` for more than a key may have, or than the disk takes."""
        self._store.grow(self._owner, self.id, len(data))
        self.num_bytes += len(data)
        with disk_faults():
            await self._store.on_disk(self._write, data)

    async def keep(self, name: str, purpose: str, keep_s: int) -> StoredFile:
        """The file that it has become."""
        with disk_faults():
            await self._store.on_disk(self._finish)
        now = self._store.now
        made = StoredFile(self.id, name, purpose, self.num_bytes, now, now + keep_s)
        await self._store.put(self._owner, made)
        self._owner.growing.pop(self.id, None)
        return made

    async def drop(self) -> None:
        """It is gone. After `keep` that did not raise it changes nothing."""
        if self._owner.growing.pop(self.id, None) is None:
            return
        self._owner.files.pop(self.id, None)
        with disk_faults():
            await self._store.on_disk(self._discard)

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            path = self._owner.content(self.id)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        write_all(self._descriptor, data)

    def _finish(self) -> None:
        self._write(b"")
        os.fsync(self._descriptor)
        self._close()

    def _discard(self) -> None:
        self._close()
        self._owner.content(self.id).unlink(missing_ok=True)
        self._owner.record(StoredFile(self.id, "", "", 0, 0, 0)).unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
