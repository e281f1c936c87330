# SPDX-License-Identifier: Apache-2.0
"""`BlockAllocator`: reference counts on the blocks of one group of the pool."""


class BlockAllocator:
    """Blocks 1 to `num_blocks - 1`; block 0 belongs to padding. Each operation costs O(1) a block."""

    def __init__(self, num_blocks: int):
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks that could be held at once."""
        return len(self._references) - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One reference more on each of `blocks`; entries of 0 are holes and stay so."""
        for block in blocks:
            if block:
                assert self._references[block] > 0, f"block {block} is shared but nobody holds it"
                self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less on each of `blocks`; a block without any is free again."""
        for block in blocks:
            if block:
                assert self._references[block] > 0, f"block {block} is released but nobody holds it"
                self._references[block] -= 1
                if not self._references[block]:
                    self._free.append(block)

    def shared(self, block: int) -> bool:
        """Whether more than one holder would see a write to `block`."""
        return self._references[block] > 1

    def check(self) -> None:
        """Asserts that every block is either free once or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, count in enumerate(self._references[1:], start=1):
            assert (count == 0) == (block in free), f"block {block} has {count} references and is free: {block in free}"
