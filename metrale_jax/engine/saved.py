# SPDX-License-Identifier: Apache-2.0
"""`SavedState`: what a sequence holds in the pool, copied out of it; `SwapSpace`: where that waits to be put back."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SavedState:
    """The state of a sequence after `seq_len` tokens, on the host.

    `held[g]` are the logical blocks of group g that it had, without those that a window has left; `blocks` and `slot`
    are pytrees of numpy arrays as the device gave them: of each group `[L, n, ...]`, `n = len(held[g])`, and of the
    slot `[L, 1, ...]`, or `()` where no layer keeps state in slots. `regime` is what the keys depend on beside tokens.
    """

    seq_len: int
    known_len: int
    regime: Hashable
    held: tuple[tuple[int, ...], ...]
    blocks: Any
    slot: Any
    num_bytes: int


class SwapSpace:
    """Room for `max_bytes` of saved states, by request id: of preempted requests, and of those that were saved by
    another process and are to go on here."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._saved: dict[int, SavedState] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._saved)

    def put(self, request_id: int, saved: SavedState, anyhow: bool = False) -> bool:
        """Whether it was taken: there was room, or it has to be."""
        if self.num_bytes + saved.num_bytes > self.max_bytes and not anyhow:
            return False
        self.drop(request_id)
        self._saved[request_id] = saved
        self.num_bytes += saved.num_bytes
        return True

    def get(self, request_id: int) -> SavedState | None:
        """What was put, which stays."""
        return self._saved.get(request_id)

    def drop(self, request_id: int) -> None:
        """Forgets what was put, if anything was."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.num_bytes -= saved.num_bytes

    def clear(self) -> None:
        """Forgets all."""
        self._saved.clear()
        self.num_bytes = 0


def bytes_of(arrays: list[np.ndarray]) -> int:
    """Their bytes together."""
    return sum(array.nbytes for array in arrays)
