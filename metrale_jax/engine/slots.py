# SPDX-License-Identifier: Apache-2.0
"""`SlotTable`: a numbered place for each running sequence, and the arrays that steps are cut from by place."""

from collections.abc import Sequence

import numpy as np

from metrale_jax.engine.lease import Lease


class SlotTable:
    """Slots 1 to `num_slots`; slot 0 is padding and its rows stay zero.

    `tables[g]` int32 `[U, M]` are block tables; they are kept as the leases grow, so that a step gathers rows and
    builds none.
    """

    def __init__(self, num_slots: int, table_width: int, num_groups: int):
        self.tables = tuple(np.zeros((num_slots + 1, table_width), np.int32) for _ in range(num_groups))
        self._free = list(range(num_slots, 0, -1))
        self._used = [False] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def claim(self) -> int:
        """A slot. The caller has checked `num_free`."""
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        assert self._used[slot], f"slot {slot} is released but nobody holds it"
        self._used[slot] = False
        self._free.append(slot)

    def write(self, slot: int, lease: Lease, start: int = 0) -> None:
        """The lease's block ids from logical block `start` on, into the slot's rows."""
        for table, blocks in zip(self.tables, lease.tables, strict=True):
            table[slot, start : len(blocks)] = blocks[start:]

    def rows(self, slots: Sequence[int] | np.ndarray) -> tuple[np.ndarray, ...]:
        """Block tables of `slots`, `[S, M]` for each group."""
        return tuple(table[slots] for table in self.tables)

    def check(self) -> None:
        """Asserts that every slot is either free once or held."""
        assert sorted(self._free) == [slot for slot, used in enumerate(self._used) if slot and not used]
