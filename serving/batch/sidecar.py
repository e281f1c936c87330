# SPDX-License-Identifier: Apache-2.0
"""The directory beside an output: one run at a time, and what must be the same when a batch goes on."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.batch.files import BatchError, told, write_whole

SUFFIX = ".state"


class Sidecar:
    """`OUTPUT.state/`, locked until `close`. Raises `BatchError` if another run has it.

    `journal` is where lines are held that have no place in the output yet.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self.journal = directory / "held.jsonl"
        with told("state directory", directory, "name an output in a writable directory"):
            directory.mkdir(exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise BatchError(
                    f"output {str(directory).removesuffix(SUFFIX)!r} is being written by another run; wait for it, or "
                    "name another output."
                ) from None

    @classmethod
    def beside(cls, output: str) -> "Sidecar":
        """The sidecar of an output file or directory."""
        path = Path(output)
        return cls(path.with_name(path.name + SUFFIX))

    def forget(self) -> None:
        """Removes what an earlier batch left."""
        with told("state directory", self._directory, "name an output in a writable directory"):
            self.journal.unlink(missing_ok=True)
            self._file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the directory, for a batch that was never begun; what lies in it besides the lock stays."""
        (self._directory / "lock").unlink(missing_ok=True)
        with suppress(OSError):
            self._directory.rmdir()

    def settle(self, identity: Mapping[str, Any]) -> int:
        """When this batch was begun, in seconds since 1970: now, if nothing is recorded.

        Raises `BatchError` if what is recorded differs from `identity` in anything.
        """
        identity = json.loads(json.dumps(identity))
        with told("state", self._file, "make it readable and writable, or give --no-resume to start afresh"):
            if not self._file.exists():
                state = {"begun": int(time.time()), "identity": identity}
                write_whole(self._file, json.dumps(state, indent=1).encode())
                return state["begun"]
            text = self._file.read_bytes()
        try:
            state = json.loads(text)
            before, begun = state["identity"], state["begun"]
        except (ValueError, KeyError, TypeError):
            raise BatchError(
                f"state {str(self._file)!r} of {len(text)} bytes is damaged; give --no-resume to start afresh."
            ) from None
        for name in {**before, **identity}:
            if before.get(name) != identity.get(name):
                raise BatchError(
                    f"{name} is {_short(identity.get(name))} and was {_short(before.get(name))} when this batch was "
                    "begun; give what it was, name another output, or give --no-resume to start afresh."
                )
        return begun

    @property
    def recorded(self) -> bool:
        """Whether a batch was begun here."""
        return self._file.exists()

    def close(self) -> None:
        """Lets another run have the output."""
        os.close(self._lock)

    @property
    def _file(self) -> Path:
        return self._directory / "batch.json"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
