# SPDX-License-Identifier: Apache-2.0
"""`Memory`: the blocks of a pool, who holds them, and what of them is kept for later prompts."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import BlockCopy, Lease
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.match import Match
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree
from metrale_jax.engine.request import Request
from metrale_jax.engine.saved import SavedState, SwapSpace
from metrale_jax.engine.snapshots import DEFAULT_POLICY, NOTHING_KEPT, KeptState, SnapshotPolicy, Snapshots
from metrale_jax.engine.spill import Spill
from pallas_kernels.shapes import ceil_div


class Memory:
    """Leases over `num_blocks` blocks of each group, and the prefix tree that keeps what leases give back.

    `windows[g]` is group g's sliding window. `regime(length)` names what a prompt of that length makes of its keys
    beside their tokens: blocks of one regime never serve another. With `keep` false nothing is kept. `snapshots` are
    for a model with recurrent layers, None for others: of such a model no prefix is of use without a state.
    `swap_bytes` of the host's memory are for states of requests that had to make room for others.
    """

    def __init__(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        block_size: int,
        regime: Callable[[int], Hashable],
        keep: bool,
        snapshots: Snapshots | None = None,
        policy: SnapshotPolicy = DEFAULT_POLICY,
        swap_bytes: int = 0,
    ):
        self.allocators = tuple(BlockAllocator(num_blocks) for _ in windows)
        self.tree = RadixTree(self.allocators, windows, block_size, snapshots)
        self.snapshots, self._policy = snapshots if keep else None, policy
        self.swap = SwapSpace(swap_bytes)
        self.spill: Spill | None = None
        self._found: dict[int, SavedState] = {}
        self._windows, self.block_size, self.regime, self._keep = windows, block_size, regime, keep

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
        and one token more. At least its last token is left to run, unless the row after it is kept."""
        before = self.num_available
        tables, pin = [], None
        saved = self._saved(request)
        if self._keep:
            tokens = request.tokens(0, request.num_tokens)
            # A prompt whose every row is looked at has to be run from its start, and a saved one has all that it needs.
            none = saved or request.params.prompt_logprobs is not None
            match = self._match(request, tokens, none)
            tables, request.seq_len, pin = match.tables, match.num_tokens, Pin(self.tree, match.node)
            request.resume, request.ending = match.snapshot, match.ending
            request.drawn_from = match.snapshot if match.ending is not None else 0
            if request.request_id in self._found:
                # Its state comes from there too, which may be deeper than what the pool has.
                request.seq_len, request.resume = self._found[request.request_id].seq_len, 0
            if self.snapshots is not None and match.ending is None:
                request.cuts = self._cuts(request, match.num_seen)
        request.lease = Lease(self.allocators, self._windows, self.block_size, tables, pin=pin)
        if saved is not None:
            request.seq_len = saved.seq_len
        return request.lease.missing(request.num_tokens + 1) + before - self.num_available

    def attach(self, spill: Spill) -> None:
        """What the pool gives up of kept prefixes is to be found in a lower tier from now on."""
        self.spill = spill
        self.tree.on_evict = spill.give_up_blocks
        if self.snapshots is not None:
            self.snapshots.on_evict = spill.give_up_state

    def _match(self, request: Request, tokens: list[int], none: bool) -> Match:
        """What the tree has of the tokens; what the lower tier has after that is noted in `_found`."""
        most = 0 if none else len(tokens) - 1
        whole = self.snapshots is not None and self._policy.whole_prompts and not none
        regime = self.regime(request.known_len)
        namespace, spill = (*request.namespace, regime), self.spill
        if spill is None or not most:
            return self.tree.match(namespace, tokens, most, whole=whole)
        digests: list[str] = []
        wanted = [0, 0]

        def reach(path: list[Node], usable: int) -> int:
            digests[:] = spill.digests(namespace, tokens[:most])
            wanted[:] = usable, spill.reach(digests, path, usable)
            return wanted[1]

        match = self.tree.match(namespace, tokens, most, reach, whole)
        usable, depth = wanted
        if depth <= usable:
            return match
        start = match.num_tokens // self.block_size
        found = spill.found(digests[:depth], start, request.known_len, regime)
        if found is not None:
            self._found[request.request_id] = found
            return match
        for allocator, table in zip(self.allocators, match.tables, strict=True):
            allocator.release(table)
        self.tree.release(match.node)
        return self.tree.match(namespace, tokens, most)

    def _saved(self, request: Request) -> SavedState | None:
        """What was saved of the request; nothing if its keys would have to be others by now."""
        saved = self.swap.get(request.request_id)
        if saved is not None and saved.regime != self.regime(request.known_len):
            self.swap.drop(request.request_id)
            return None
        return saved

    def returned(self, request: Request) -> SavedState | None:
        """What was saved of a request, or found in a lower tier, that has its lease for all of it; it is no longer kept
        here. Raises `ConfigError` where it cannot be read."""
        found = self._found.pop(request.request_id, None)
        saved = self.swap.take(request.request_id)
        return found if saved is None else saved

    def promote(self, request: Request) -> KeptState:
        """Keeps in the tree what was just put back of a prefix that was found in a lower tier, and says where its state
        goes: the next to ask for it finds both here."""
        self.keep(request)
        pin = request.lease.pin
        if self.snapshots is None or pin.num_tokens != request.seq_len or not self.tree.knows(pin.node):
            return NOTHING_KEPT
        return KeptState(self.snapshots.take(pin.node))

    def saved_state(self, request: Request, blocks: Any, slot: Any, num_bytes: int) -> SavedState:
        """The state of a request, whose blocks (see `held_blocks`) and slot hold `blocks` and `slot`."""
        held = tuple(tuple(i for i, block in enumerate(table) if block) for table in self._written(request))
        regime = self.regime(request.known_len)
        return SavedState(request.seq_len, request.known_len, regime, held, blocks, slot, num_bytes)

    def held_blocks(self, request: Request) -> list[list[int]]:
        """The blocks of each group that hold something of the request, in order."""
        return [[block for block in table if block] for table in self._written(request)]

    def _written(self, request: Request) -> list[list[int]]:
        count = ceil_div(request.seq_len, self.block_size)
        return [table[:count] for table in request.lease.tables]

    def grow(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """Room for `num_tokens` in the request's lease, and the copies that its next write needs; None if even
        eviction leaves too few blocks."""
        if not self._has_free(request.lease.wanted(num_tokens, request.seq_len)):
            return None
        return request.lease.grow(num_tokens, request.seq_len)

    def _has_free(self, wanted: Sequence[int]) -> bool:
        """Whether each group has its `wanted` free blocks, after evictions where that is enough."""
        short = [count - allocator.num_free for allocator, count in zip(self.allocators, wanted, strict=True)]
        if max(short) <= 0:
            return True
        if any(count > evictable for count, evictable in zip(short, self.tree.num_evictable, strict=True)):
            return False
        return self.tree.evict(wanted)

    def keep(self, request: Request) -> bool:
        """Puts the request's whole blocks whose writing is dispatched, and whose tokens are known, into the tree.

        Whether its tables changed: where the tree has an equal block already, the request goes on with that one.
        """
        if not self._keep:
            return False
        written = min(request.seq_len, request.num_tokens)
        if self.regime(written) != self.regime(request.known_len):
            written = min(written, request.known_len)
        pin, tables = request.lease.pin, request.lease.tables
        before = pin.num_tokens
        if written - before < self.block_size:
            return False
        pin.extend(request.tokens(before, written), tables)
        return pin.share(before, tables)

    def _cuts(self, request: Request, num_seen: int) -> tuple[int, ...]:
        """Lengths at which the request's prompt is cut, for the sake of the snapshots that can be taken there."""
        policy, size = self._policy, self.block_size
        wanted = (policy.branches, num_seen), (policy.last_block, (request.num_tokens - 1) // size * size)
        least = request.seq_len + policy.min_tokens
        return tuple(sorted({length for asked, length in wanted if asked and length >= least}))

    def at_chunk_end(self, request: Request) -> KeptState:
        """What is to be kept of a request whose chunk is dispatched."""
        policy, node = self._policy, None
        if self.snapshots is None:
            return NOTHING_KEPT
        ends = policy.whole_prompts and not request.remaining
        if ends or policy.chunk_ends or request.seq_len in request.cuts:
            node, copies = self._node_at_end(request, with_tail=ends)
        if node is None:
            return NOTHING_KEPT
        unit = self.snapshots.take(node)
        return KeptState(unit, self.snapshots.take_row(node) if policy.whole_prompts else 0, copies)

    def _node_at_end(self, request: Request, with_tail: bool) -> tuple[Node | None, tuple[BlockCopy, ...]]:
        """The node at the end of what a request has run, and the copies that its blocks are to be made of."""
        pin, size, length = request.lease.pin, self.block_size, request.seq_len
        whole = length // size * size
        if not length or pin.num_tokens != whole or not self.tree.knows(pin.node):
            return None, ()
        if length == whole:
            return pin.node, ()
        if not with_tail or not self.snapshots.stats.num_units:
            return None, ()
        if length > request.known_len and self.regime(length) != self.regime(request.known_len):
            return None, ()
        tokens = request.tokens(whole, length)
        kept = pin.node.children.get(tuple(tokens))
        if kept is not None:
            return kept, ()
        # The request goes on writing to its own block.
        wanted = (1,) * len(self.allocators)
        if not self._has_free(wanted):
            return None, ()
        targets = [allocator.allocate(1)[0] for allocator in self.allocators]
        sources = [table[whole // size] for table in request.lease.tables]
        pairs = zip(sources, targets, strict=True)
        copies = tuple(BlockCopy(group, source, target) for group, (source, target) in enumerate(pairs))
        return self.tree.add_tail(pin.node, tokens, tuple(targets)), copies

    def tail_copies(self, request: Request) -> list[BlockCopy]:
        """The copies that give a request its own of the block that its tokens end in, where all of them were found."""
        if request.ending is None or not request.num_tokens % self.block_size:
            return []
        place = request.num_tokens // self.block_size
        pairs = zip(request.ending.blocks, request.lease.tables, strict=True)
        return [BlockCopy(group, block, table[place]) for group, (block, table) in enumerate(pairs)]

    def let_go(self, request: Request) -> None:
        """Unpins the ending of a request that no longer needs it."""
        if request.ending is not None:
            self.tree.release(request.ending)
            request.ending = None

    def checkpoint(self, request: Request, before: int) -> int:
        """The same for a request that decodes, and came from `before` tokens to where it stands: a state that waits for
        its drafts is one of each length between."""
        every = self._policy.decode_blocks * self.block_size
        length = request.seq_len // every * every if every else 0
        if self.snapshots is None or length <= before:
            return 0
        self._end_checkpoint(request, None)
        request.checkpoint = self.snapshots.checkpoint(length)
        return request.checkpoint.unit if request.checkpoint is not None else 0

    def _end_checkpoint(self, request: Request, node: Node | None) -> None:
        if request.checkpoint is not None:
            self.snapshots.keep(request.checkpoint, node)
            request.checkpoint = None

    def end(self, request: Request, keep: bool) -> None:
        """Takes the request's lease back; with `keep`, what it wrote stays for later prompts."""
        if request.lease is not None:
            if keep:
                self.keep(request)
            if request.checkpoint is not None:
                self._end_checkpoint(
                    request, request.lease.pin.node_at(request.checkpoint.num_tokens) if keep else None
                )
            self.let_go(request)
            request.lease.release()
            request.lease, request.resume, request.drawn_from, request.cuts = None, 0, 0, ()
            self._found.pop(request.request_id, None)

    def forget(self, distrusted: bool = True) -> None:
        """Drops all that is kept in the pool, which is lost, and where it is not to be trusted what came of it too."""
        self.tree.clear()
        if self.spill is not None:
            self.spill.tier.forget_arriving()
        if distrusted:
            self.swap.clear()
            if self.spill is not None:
                self.spill.tier.clear()

    def check(self, idle: bool) -> None:
        """Asserts that references add up, and in an `idle` engine that nothing but the tree holds a block."""
        self.tree.check()
        running = self.snapshots.stats.num_running if self.snapshots is not None else 0
        assert not idle or not running, f"an idle engine holds {running} checkpoints"
        for group, allocator in enumerate(self.allocators):
            allocator.check()
            held = allocator.num_usable - allocator.num_free
            assert not idle or held == self.tree.num_evictable[group], f"an idle engine holds {held} blocks"
