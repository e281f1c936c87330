# SPDX-License-Identifier: Apache-2.0
"""`Tier`: what the pool had to give up of kept prefixes, in the host's memory and, if asked for, on disk.

An entry is a block of one group of layers, or a recurrent state, found by a digest of all that decides its content: the
namespace and every token up to its end. So an entry is the same in every process that runs the same model.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from metrale_jax.engine.disk import DiskStore
from metrale_jax.engine.leaves import Node

Key = tuple[str, str]


@dataclass(frozen=True)
class TierStats:
    """Entries and bytes in memory, prompts that went on from one, entries that came, and files."""

    num_entries: int
    num_bytes: int
    hits: int
    spilled: int
    num_files: int


def digests_of(namespace: Hashable, tokens: Sequence[int], block_size: int) -> list[str]:
    """The digest of each whole block of `tokens`."""
    found, digest = [], _root(namespace)
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        digest = _next(digest, tokens[start : start + block_size])
        found.append(digest)
    return found


def node_digest(node: Node) -> str:
    """The digest of a node of the prefix tree, whose root's key is the namespace."""
    path = []
    while node.parent is not None:
        path.append(node.key)
        node = node.parent
    digest = _root(node.key)
    for tokens in reversed(path):
        digest = _next(digest, tokens)
    return digest


def _root(namespace: Hashable) -> str:
    return blake2b(repr(namespace).encode(), digest_size=16).hexdigest()


def _next(digest: str, tokens: Sequence[int]) -> str:
    return blake2b(digest.encode() + np.asarray(tokens, np.int64).tobytes(), digest_size=16).hexdigest()


class Tier:
    """Entries of at most `max_bytes`, least recently used first out, over a `disk` that keeps them all, or None.

    Content is read from the device when the pool gives it up, and arrives here with `settle`.
    """

    def __init__(self, max_bytes: int, disk: DiskStore | None = None):
        self._max_bytes, self._disk = max_bytes, disk
        self._entries: OrderedDict[Key, list[np.ndarray]] = OrderedDict()
        self._arriving: list[tuple[list[Key], Any]] = []
        self._num_bytes = self._hits = self._spilled = 0

    @property
    def stats(self) -> TierStats:
        """What is here."""
        files = self._disk.num_files if self._disk is not None else 0
        return TierStats(len(self._entries), self._num_bytes, self._hits, self._spilled, files)

    def wants(self, kind: str, digest: str) -> bool:
        """Whether an entry that is given up is not here yet; one that is counts as used now."""
        return not self._touched((kind, digest)) and not any((kind, digest) in keys for keys, _ in self._arriving)

    def spill(self, keys: Sequence[Key], content: Any) -> None:
        """Takes what the device will have read: `content(fetch)` gives the arrays of each of `keys`, in order."""
        self._arriving.append((list(keys), content))

    def settle(self, fetch: Callable) -> None:
        """Takes in what was spilled. Raises what `fetch` raises, after which that is forgotten."""
        arriving, self._arriving = self._arriving, []
        for keys, content in arriving:
            for key, arrays in zip(keys, content(fetch), strict=True):
                self._spilled += 1
                self._put(key, arrays)
                if self._disk is not None:
                    self._disk.put(*key, arrays)

    def has(self, kind: str, digest: str) -> bool:
        """Whether there is such an entry, which counts as used now."""
        return self._touched((kind, digest))

    def get(self, kind: str, digest: str) -> list[np.ndarray] | None:
        """The arrays of an entry; None if there is none, or they cannot be read after all."""
        return self._get((kind, digest))

    def count_hit(self) -> None:
        """A prompt goes on from what was here."""
        self._hits += 1

    def clear(self) -> None:
        """Forgets all, files too: it is not to be trusted."""
        self._entries.clear()
        self._arriving.clear()
        self._num_bytes = 0
        if self._disk is not None:
            self._disk.clear()

    def forget_arriving(self) -> None:
        """Forgets what the device owes: its pool is lost."""
        self._arriving.clear()

    def _touched(self, key: Key) -> bool:
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        return self._disk is not None and self._disk.has(*key)

    def _get(self, key: Key) -> list[np.ndarray] | None:
        if key in self._entries:
            return self._entries[key]
        arrays = self._disk.get(*key) if self._disk is not None else None
        if arrays is not None:
            self._put(key, arrays)
        return arrays

    def _put(self, key: Key, arrays: list[np.ndarray]) -> None:
        size = sum(array.nbytes for array in arrays)
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = arrays
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, old = self._entries.popitem(last=False)
            self._num_bytes -= sum(array.nbytes for array in old)
