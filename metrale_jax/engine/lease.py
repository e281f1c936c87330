# SPDX-License-Identifier: Apache-2.0
"""`Lease`: what a sequence holds in the pool, given back exactly once whatever fails."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from metrale_jax.engine.blocks import BlockAllocator
from pallas_kernels.shapes import ceil_div


@dataclass(frozen=True)
class BlockCopy:
    """A block to be copied on the device before the next write: `group`, `source`, `target`."""

    group: int
    source: int
    target: int


class AbstractPin(ABC):
    """What keeps the shared blocks that a lease was born with from being evicted."""

    @abstractmethod
    def fork(self) -> "AbstractPin":
        """A second pin on the same blocks."""

    @abstractmethod
    def release(self) -> None:
        """Unpins, once."""


def first_visible_block(seq_len: int, window: int, block_size: int) -> int:
    """Logical block with the first token that the token at position `seq_len` or a later one sees."""
    return max(0, seq_len - window + 1) // block_size if window else 0


@dataclass
class Lease:
    """Block ids for each attention group, logical block i of the sequence at index i; 0 is a hole left by a window.

    `windows[g]` is group g's sliding window in tokens, 0 for none. A lease on cached blocks is born with their
    `tables`, a reference on each, and the `pin` on them: both are the lease's to give back. `forked` says that the
    next write may be to a block that another lease holds too. `capacity` counts the tokens that fit without a call of
    `grow`: 0 after a fork, since the next write may need a copy.
    """

    allocators: tuple[BlockAllocator, ...]
    windows: tuple[int, ...]
    block_size: int
    tables: list[list[int]] = field(default_factory=list)
    released: bool = False
    pin: AbstractPin | None = None
    forked: bool = False
    capacity: int = field(init=False)

    def __post_init__(self):
        if not self.tables:
            self.tables = [[] for _ in self.allocators]
        self.capacity = 0 if self.forked else len(self.tables[0]) * self.block_size

    def missing(self, num_tokens: int) -> int:
        """Most blocks that any group lacks to hold `num_tokens`."""
        return max(0, ceil_div(num_tokens, self.block_size) - len(self.tables[0]))

    def wanted(self, num_tokens: int, written: int) -> tuple[int, ...]:
        """Free blocks of each group that `grow` with these arguments takes, copies on write included; exact."""
        missing = self.missing(num_tokens)
        if not self.forked:
            return (missing,) * len(self.tables)
        return tuple(
            missing + len(self._shared(allocator, table, written))
            for allocator, table in zip(self.allocators, self.tables, strict=True)
        )

    def can_grow(self, num_tokens: int, written: int) -> bool:
        """Whether `grow` with these arguments would find its blocks; exact."""
        wanted = self.wanted(num_tokens, written)
        return all(allocator.num_free >= count for allocator, count in zip(self.allocators, wanted, strict=True))

    def grow(self, num_tokens: int, written: int) -> list[BlockCopy]:
        """Room for `num_tokens`, and the copies that make every block from token `written` on this lease's own."""
        assert not self.released, "a released lease cannot grow"
        copies = []
        missing = self.missing(num_tokens)
        for group, (allocator, table) in enumerate(zip(self.allocators, self.tables, strict=True)):
            for index in self._shared(allocator, table, written):
                own = allocator.allocate(1)[0]
                copies.append(BlockCopy(group, table[index], own))
                allocator.release([table[index]])
                table[index] = own
            table.extend(allocator.allocate(missing))
        self.forked = False
        self.capacity = len(self.tables[0]) * self.block_size
        return copies

    def _shared(self, allocator: BlockAllocator, table: list[int], written: int) -> list[int]:
        if not self.forked:
            return []
        later = range(written // self.block_size, len(table))
        return [index for index in later if table[index] and allocator.shared(table[index])]

    def drop_behind_windows(self, seq_len: int) -> bool:
        """Gives back blocks that no later token can see; whether any were."""
        dropped = False
        for allocator, table, window in zip(self.allocators, self.tables, self.windows, strict=True):
            if not window:
                continue
            first = first_visible_block(seq_len, window, self.block_size)
            for index in range(min(first, len(table)) - 1, -1, -1):
                if not table[index]:
                    break
                allocator.release([table[index]])
                table[index] = 0
                dropped = True
        return dropped

    def fork(self, num_tokens: int | None = None) -> "Lease":
        """A second holder of the same blocks, or of those of the first `num_tokens`; either copies the block it next
        writes to while both hold it."""
        assert not self.released, "a released lease cannot be forked"
        count = None if num_tokens is None else ceil_div(num_tokens, self.block_size)
        tables = [table[:count] for table in self.tables]
        for allocator, table in zip(self.allocators, tables, strict=True):
            allocator.share(table)
        pin = self.pin.fork() if self.pin else None
        self.forked, self.capacity = True, 0
        return Lease(self.allocators, self.windows, self.block_size, tables, pin=pin, forked=True)

    def release(self) -> None:
        """Gives everything back."""
        assert not self.released, "a lease is released once"
        self.released = True
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            allocator.release(table)
            table.clear()
        if self.pin:
            self.pin.release()
