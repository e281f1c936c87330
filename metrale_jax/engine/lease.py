# SPDX-License-Identifier: Apache-2.0
"""`Lease`: what a sequence holds in the pool, given back exactly once whatever fails."""

from dataclasses import dataclass, field

from metrale_jax.engine.blocks import BlockAllocator
from pallas_kernels.shapes import ceil_div


@dataclass(frozen=True)
class BlockCopy:
    """A block to be copied on the device before the next write: `group`, `source`, `target`."""

    group: int
    source: int
    target: int


@dataclass
class Lease:
    """Block ids for each attention group, logical block i of the sequence at index i; 0 is a hole left by a window.

    `windows[g]` is group g's sliding window in tokens, 0 for none.
    """

    allocators: tuple[BlockAllocator, ...]
    windows: tuple[int, ...]
    block_size: int
    tables: list[list[int]] = field(default_factory=list)
    released: bool = False

    def __post_init__(self):
        if not self.tables:
            self.tables = [[] for _ in self.allocators]

    def missing(self, num_tokens: int) -> int:
        """Most blocks that any group lacks to hold `num_tokens`."""
        return max(0, ceil_div(num_tokens, self.block_size) - len(self.tables[0]))

    def can_grow(self, num_tokens: int, written: int) -> bool:
        """Whether `grow` with these arguments would find its blocks, copies on write included; exact."""
        missing = self.missing(num_tokens)
        return all(
            allocator.num_free >= missing + len(self._shared(allocator, table, written))
            for allocator, table in zip(self.allocators, self.tables, strict=True)
        )

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
        return copies

    def _shared(self, allocator: BlockAllocator, table: list[int], written: int) -> list[int]:
        later = range(written // self.block_size, len(table))
        return [index for index in later if table[index] and allocator.shared(table[index])]

    def drop_behind_windows(self, seq_len: int) -> bool:
        """Gives back blocks that no later token can see; whether any were."""
        dropped = False
        for allocator, table, window in zip(self.allocators, self.tables, self.windows, strict=True):
            last = max(0, seq_len - window + 1) // self.block_size if window else 0
            for index in range(min(last, len(table)) - 1, -1, -1):
                if not table[index]:
                    break
                allocator.release([table[index]])
                table[index] = 0
                dropped = True
        return dropped

    def fork(self) -> "Lease":
        """A second holder of the same blocks; either copies the block it next writes to while both hold it."""
        assert not self.released, "a released lease cannot be forked"
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            allocator.share(table)
        return Lease(self.allocators, self.windows, self.block_size, [list(table) for table in self.tables])

    def release(self) -> None:
        """Gives everything back."""
        assert not self.released, "a lease is released once"
        self.released = True
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            allocator.release(table)
            table.clear()
