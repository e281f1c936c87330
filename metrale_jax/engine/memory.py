# SPDX-License-Identifier: Apache-2.0
"""`Memory`: the blocks of a pool, who holds them, and what of them is kept for later prompts."""

from collections.abc import Callable, Hashable

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import BlockCopy, Lease
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree
from metrale_jax.engine.request import Request


class Memory:
    """Leases over `num_blocks` blocks of each group, and the prefix tree that keeps what leases give back.

    `windows[g]` is group g's sliding window. `regime(length)` names what a prompt of that length makes of its keys
    beside their tokens: blocks of one regime never serve another. With `keep` false nothing is kept.
    """

    def __init__(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        block_size: int,
        regime: Callable[[int], Hashable],
        keep: bool,
    ):
        self.allocators = tuple(BlockAllocator(num_blocks) for _ in windows)
        self.tree = RadixTree(self.allocators, windows, block_size)
        self._windows, self._block_size, self._regime, self._keep = windows, block_size, regime, keep

    @property
    def num_usable(self) -> int:
        """Blocks of a group that could be held at once."""
        return self.allocators[0].num_usable

    @property
    def num_available(self) -> int:
        """Blocks that the scarcest group could give now: free ones, and kept ones that nobody uses."""
        pairs = zip(self.allocators, self.tree.num_evictable, strict=True)
        return min(allocator.num_free + evictable for allocator, evictable in pairs)

    def begin(self, request: Request) -> int:
        """Gives a request its lease, over what is cached of its tokens; returns the blocks it takes to hold the rest
        and one token more. At least its last token is left to run."""
        before = self.num_available
        tables, pin = [], None
        if self._keep:
            tokens = request.tokens(0, request.num_tokens)
            # A prompt whose every row is looked at has to be run from its start.
            most = 0 if request.params.prompt_logprobs is not None else request.num_tokens - 1
            match = self.tree.match((*request.namespace, self._regime(request.known_len)), tokens, most)
            tables, request.seq_len, pin = match.tables, match.num_tokens, Pin(self.tree, match.node)
        request.lease = Lease(self.allocators, self._windows, self._block_size, tables, pin=pin)
        return request.lease.missing(request.num_tokens + 1) + before - self.num_available

    def grow(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """Room for `num_tokens` in the request's lease, and the copies that its next write needs; None if even
        eviction leaves too few blocks."""
        wanted = request.lease.wanted(num_tokens, request.seq_len)
        short = [count - allocator.num_free for allocator, count in zip(self.allocators, wanted, strict=True)]
        if max(short) > 0:
            if any(count > evictable for count, evictable in zip(short, self.tree.num_evictable, strict=True)):
                return None
            self.tree.evict(wanted)
        return request.lease.grow(num_tokens, request.seq_len)

    def keep(self, request: Request) -> bool:
        """Puts the request's whole blocks whose writing is dispatched, and whose tokens are known, into the tree.

        Whether its tables changed: where the tree has an equal block already, the request goes on with that one.
        """
        if not self._keep:
            return False
        written = min(request.seq_len, request.num_tokens)
        if self._regime(written) != self._regime(request.known_len):
            written = min(written, request.known_len)
        pin, tables = request.lease.pin, request.lease.tables
        before = pin.num_tokens
        if written - before < self._block_size:
            return False
        pin.extend(request.tokens(before, written), tables)
        return pin.share(before, tables)

    def end(self, request: Request, keep: bool) -> None:
        """Takes the request's lease back; with `keep`, what it wrote stays for later prompts."""
        if request.lease is not None:
            if keep:
                self.keep(request)
            request.lease.release()
            request.lease = None

    def forget(self) -> None:
        """Drops all that is kept: what the pool held is lost, or not to be trusted."""
        self.tree.clear()

    def check(self, idle: bool) -> None:
        """Asserts that references add up, and in an `idle` engine that nothing but the tree holds a block."""
        self.tree.check()
        for group, allocator in enumerate(self.allocators):
            allocator.check()
            held = allocator.num_usable - allocator.num_free
            assert not idle or held == self.tree.num_evictable[group], f"an idle engine holds {held} blocks"
