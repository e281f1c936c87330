# SPDX-License-Identifier: Apache-2.0
"""Which lines are done and which ids were seen, in memory that does not grow with the input."""

import sqlite3
from hashlib import blake2b

from serving.batch.files import BatchError

CACHE_KIB = 4096
# Bits that are done are dropped in pieces of this many bytes.
PAGE_BYTES = 1024


class DoneLines:
    """Numbers of lines that are done: all below `floor`, and a bit for each line from there to the furthest one.

    While a batch runs, how far it looks ahead bounds the bits; `count` is how many lines are done.
    """

    def __init__(self):
        self.floor = 1
        self.count = 0
        self._first = 0  # the line of the first bit
        self._bits = bytearray()

    def __contains__(self, line: int) -> bool:
        byte, bit = divmod(line - self._first, 8)
        return line < self.floor or (byte < len(self._bits) and bool(self._bits[byte] >> bit & 1))

    def add(self, line: int) -> bool:
        """Marks a line; returns whether it is new."""
        if line in self:
            return False
        byte, bit = divmod(line - self._first, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self.count += 1
        if line == self.floor:
            self._raise_floor()
        return True

    def _raise_floor(self) -> None:
        self.floor += 1
        while self.floor in self:
            self.floor += 1
        pages = (self.floor - self._first) // 8 // PAGE_BYTES
        if pages:
            del self._bits[: pages * PAGE_BYTES]
            self._first += pages * PAGE_BYTES * 8


class SeenIds:
    """The ids so far with the lines that brought them, in a nameless database on disk that goes when it is closed."""

    def __init__(self):
        # An empty name makes SQLite keep what exceeds its cache in a temporary file.
        self._database = sqlite3.connect("", isolation_level=None)
        for setting in (f"cache_size = -{CACHE_KIB}", "journal_mode = off", "synchronous = off"):
            self._database.execute(f"pragma {setting}")
        self._database.execute("create table seen (id blob primary key, line integer) without rowid")
        self._database.execute("begin")

    def first_line(self, spelling: str, line: int) -> int:
        """The line that first brought this id: `line` itself if it is new. Raises `BatchError` on a full disk."""
        digest = blake2b(spelling.encode(), digest_size=16).digest()
        try:
            found = self._database.execute("insert or ignore into seen values (?, ?)", (digest, line))
            if found.rowcount:
                return line
            return self._database.execute("select line from seen where id = ?", (digest,)).fetchone()[0]
        except sqlite3.OperationalError as error:
            raise BatchError(
                f"the temporary file that holds the ids up to line {line} cannot grow ({error}); free some space "
                "where temporary files live and run the command again."
            ) from None

    def close(self) -> None:
        """Drops the database."""
        self._database.close()
