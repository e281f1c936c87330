# SPDX-License-Identifier: Apache-2.0
"""A radix tree under random commands: what a match returns holds what those tokens would have written.

`World` plays the engine. Each token written leaves a mark in its slot of the pool that stands for its namespace and all
tokens up to it, so a block says exactly what was computed into it, and a fresh block says nothing.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import Lease
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree

BLOCK_SIZE = 2
WINDOWS = (0, 6, 3)
# The groups run out one before the other.
NUM_BLOCKS = (40, 26, 32)
MOST_LEASES = 5
MOST_TOKENS = 24


@dataclass
class Sequence:
    """A live lease and what it wrote; `orphan`: since it was admitted the tree was cleared."""

    lease: Lease
    namespace: str
    tokens: list[int]
    orphan: bool = False


class World:
    """Every command takes numbers and does nothing where it does not apply. `kept` is the truth about the tree: the
    blocks of each node by its namespace and its tokens from the beginning, as insertions and evictions should leave it.
    """

    def __init__(self):
        self.allocators = tuple(BlockAllocator(count) for count in NUM_BLOCKS)
        self.tree = RadixTree(self.allocators, WINDOWS, BLOCK_SIZE)
        self.memory = [{} for _ in WINDOWS]
        self.live: list[Sequence] = []
        self.kept: dict[tuple, list[int]] = {}
        # When each node was last let go; what was never pinned is not there.
        self.used: dict[tuple, int] = {}
        self.releases = 0
        self.asked = self.hit = 0

    def admit(self, namespace: int, tokens: list[int], most: int, later: bool) -> None:
        if len(self.live) == MOST_LEASES:
            return
        name = "ab"[namespace % 2]
        deepest = self.deepest_match(name, tokens, most)
        match = self.tree.match(name, tokens, most)
        assert match.num_tokens == deepest
        lease = Lease(self.allocators, WINDOWS, BLOCK_SIZE, match.tables, pin=Pin(self.tree, match.node))
        self.asked, self.hit = self.asked + max(0, min(len(tokens), most)), self.hit + match.num_tokens
        assert lease.pin.num_tokens == match.num_tokens
        sequence = Sequence(lease, name, tokens[: match.num_tokens])
        self.live.append(sequence)
        self.check_reading(sequence)
        assert not lease.drop_behind_windows(match.num_tokens), "a match holds nothing behind its windows"
        if not later and not self.write(-1, tokens[match.num_tokens :]):
            self.release(-1)

    def write(self, which: int, tokens: list[int]) -> bool:
        """Room, by eviction if need be, and the tokens in it; false if there is no room."""
        sequence = self.pick(which)
        if sequence is None or len(sequence.tokens) + len(tokens) > MOST_TOKENS:
            return True
        lease, written = sequence.lease, len(sequence.tokens)
        wanted = lease.wanted(written + len(tokens), written)
        reached = self.evict(list(wanted))
        assert reached == lease.can_grow(written + len(tokens), written)
        if not reached:
            return False
        before = [list(table) for table in lease.tables]
        copies = lease.grow(written + len(tokens), written)
        for group, table in enumerate(lease.tables):
            for index, block in enumerate(table):
                if block and (index >= len(before[group]) or block != before[group][index]):
                    self.memory[group][block] = [None] * BLOCK_SIZE
        for copy in copies:
            self.memory[copy.group][copy.target] = list(self.memory[copy.group][copy.source])
        for token in tokens:
            index, offset = divmod(len(sequence.tokens), BLOCK_SIZE)
            sequence.tokens.append(token)
            for group, table in enumerate(lease.tables):
                assert not self.allocators[group].shared(table[index]), "a write reaches other holders"
                self.memory[group][table[index]][offset] = (sequence.namespace, *sequence.tokens)
        return True

    def extend(self, which: int, most: int) -> None:
        sequence = self.pick(which)
        if sequence is None:
            return
        pin, tables = sequence.lease.pin, sequence.lease.tables
        start = pin.num_tokens
        end = min(len(sequence.tokens), start + most)
        pin.extend(sequence.tokens[start:end], tables)
        if sequence.orphan:
            assert pin.num_tokens == start
            return
        for index in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
            blocks = [table[index] for table in tables]
            taken = index < pin.num_tokens // BLOCK_SIZE
            key = (sequence.namespace, *sequence.tokens[: (index + 1) * BLOCK_SIZE])
            if not taken:
                assert key not in self.kept, "what is there already is gone down"
                others = [other for other in self.live if other is not sequence]
                held = [b in other.lease.tables[g] for g, b in enumerate(blocks) if b for other in others]
                assert any(held), "only a block that others hold is refused"
                break
            kept = self.kept.setdefault(key, [0] * len(WINDOWS))
            for group, block in enumerate(blocks):
                alone = sum(block in other.lease.tables[group] for other in self.live) == 1
                if not kept[group] and block and alone:
                    kept[group] = block

    def drop(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is not None:
            sequence.lease.drop_behind_windows(len(sequence.tokens))

    def fork(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is not None and len(self.live) < MOST_LEASES:
            tokens = list(sequence.tokens)
            self.live.append(Sequence(sequence.lease.fork(), sequence.namespace, tokens, sequence.orphan))

    def release(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence is not None:
            pinned = self.pinned()
            self.live.remove(sequence)
            sequence.lease.release()
            self.releases += 1
            self.used.update(dict.fromkeys(pinned - self.pinned(), self.releases))

    def evict(self, wanted: list[int]) -> bool:
        self.kept, reached = self.after_eviction(wanted)
        assert self.tree.evict(wanted) == reached
        return reached

    def clear(self) -> None:
        self.tree.clear()
        self.kept = {}
        for sequence in self.live:
            sequence.orphan = True

    # What should be, worked out the slow way.

    def pick(self, which: int) -> Sequence | None:
        return self.live[which % len(self.live)] if self.live else None

    def walked(self) -> dict[tuple, tuple[int, ...]]:
        found = {}
        stack = [((name,), root) for name, root in self.tree._roots.items()]
        while stack:
            prefix, node = stack.pop()
            for tokens, child in node.children.items():
                found[(*prefix, *tokens)] = child.blocks
                stack.append(((*prefix, *tokens), child))
        return found

    def pinned(self) -> set[tuple]:
        paths = [(s.namespace, *s.tokens[: s.lease.pin.num_tokens]) for s in self.live if not s.orphan]
        return {path[: end + 1] for path in paths for end in range(BLOCK_SIZE, len(path), BLOCK_SIZE)}

    def evictable(self) -> list[int]:
        pinned = self.pinned()
        loose = [blocks for key, blocks in self.kept.items() if key not in pinned]
        return [sum(1 for blocks in loose if blocks[group]) for group in range(len(WINDOWS))]

    def after_eviction(self, wanted: list[int]) -> tuple[dict, bool]:
        """What is left once the leaf that was let go first is gone, and the next, until `wanted` blocks are free.

        What blocks cost to compute does not count: all prompts are too short.
        """
        kept, pinned = dict(self.kept), self.pinned()
        free = [allocator.num_free for allocator in self.allocators]
        while any(a < b for a, b in zip(free, wanted, strict=True)):
            parents = {key[:-BLOCK_SIZE] for key in kept}
            leaves = [key for key in kept if key not in pinned and key not in parents]
            if not leaves:
                return kept, False
            gone = kept.pop(min(leaves, key=self.used.__getitem__))
            free = [count + bool(block) for count, block in zip(free, gone, strict=True)]
        return kept, True

    def deepest_match(self, namespace: str, tokens: list[int], most: int) -> int:
        def sees_all(length: int) -> bool:
            for group, window in enumerate(WINDOWS):
                for position in range(length):
                    seen = not window or position > length - window
                    key = (namespace, *tokens[: position // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE])
                    if key not in self.kept or (seen and not self.kept[key][group]):
                        return False
            return True

        lengths = range(0, max(0, min(len(tokens), most)) + 1, BLOCK_SIZE)
        return max(length for length in lengths if sees_all(length))

    def check_reading(self, sequence: Sequence) -> None:
        length = len(sequence.tokens)
        for group, window in enumerate(WINDOWS):
            table = sequence.lease.tables[group]
            for position in range(max(0, length - window + 1) if window else 0, length):
                index, offset = divmod(position, BLOCK_SIZE)
                mark = self.memory[group][table[index]][offset]
                assert table[index] and mark == (sequence.namespace, *sequence.tokens[: position + 1])

    def check(self) -> None:
        self.tree.check()
        walked = self.walked()
        assert walked == {key: tuple(blocks) for key, blocks in self.kept.items()}
        assert list(self.tree.num_evictable) == self.evictable()
        names = {key[0] for key in self.kept} | {s.namespace for s in self.live if not s.orphan}
        assert self.tree._roots.keys() == names
        stats = self.tree.stats
        assert (stats.query_tokens, stats.hit_tokens, stats.num_nodes) == (self.asked, self.hit, len(walked))
        for sequence in self.live:
            self.check_reading(sequence)
        for group, allocator in enumerate(self.allocators):
            allocator.check()
            holders = Counter(block for s in self.live for block in s.lease.tables[group] if block)
            holders.update(blocks[group] for blocks in walked.values() if blocks[group])
            assert allocator._references == [holders[block] for block in range(NUM_BLOCKS[group])]
            assert stats.num_blocks[group] == sum(1 for blocks in walked.values() if blocks[group])
            for key, blocks in walked.items():
                if blocks[group]:
                    ends = range(len(key) - BLOCK_SIZE + 1, len(key) + 1)
                    assert self.memory[group][blocks[group]] == [key[:end] for end in ends], "a block was overwritten"

    def finish(self) -> None:
        """Everything given back in any order, every block is free."""
        while self.live:
            self.release(len(self.live) * 7)
        assert self.evict([count - 1 for count in NUM_BLOCKS])
        self.check()
        assert not self.kept and not self.tree._roots
        assert all(allocator.num_free == allocator.num_usable for allocator in self.allocators)


numbers = st.integers(0, 59)
# Two tokens and few beginnings make equal prefixes the rule.
texts = st.lists(st.sampled_from((0, 0, 0, 1)), max_size=MOST_TOKENS)


class RadixMachine(RuleBasedStateMachine):
    """The commands of `World`, drawn by hypothesis."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(namespace=numbers, tokens=texts, most=st.integers(-1, MOST_TOKENS), later=st.booleans())
    def admit(self, namespace, tokens, most, later):
        self.world.admit(namespace, tokens, most, later)

    @rule(namespace=numbers, tokens=texts)
    def admit_and_keep(self, namespace, tokens):
        self.world.admit(namespace, tokens, len(tokens) - 1, later=False)
        self.world.extend(-1, MOST_TOKENS)

    @rule(which=numbers, tokens=st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=7))
    def write(self, which, tokens):
        self.world.write(which, tokens)

    @rule(which=numbers, most=st.integers(0, MOST_TOKENS))
    def extend(self, which, most):
        self.world.extend(which, most)

    @rule(which=numbers)
    def drop(self, which):
        self.world.drop(which)

    @rule(which=numbers)
    def fork(self, which):
        self.world.fork(which)

    @rule(which=numbers)
    def release(self, which):
        self.world.release(which)

    @rule(wanted=st.tuples(*(st.integers(0, count) for count in NUM_BLOCKS)))
    def evict(self, wanted):
        self.world.evict(list(wanted))

    @rule(chance=st.integers(0, 7))
    def clear(self, chance):
        if chance == 7:
            self.world.clear()

    @invariant()
    def everything_is_as_the_model_says(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=200, stateful_step_count=60, deadline=None, derandomize=True)


def run_commands(seed: int, count: int) -> World:
    """`count` random commands on a fresh world, all checked, far faster than hypothesis draws them."""
    chance = random.Random(seed)
    world = World()

    def text(most: int) -> list[int]:
        return chance.choices((0, 1), (7, 1), k=chance.randrange(most))

    for step in range(count):
        which, command = chance.randrange(60), chance.choices(range(8), (20, 15, 20, 8, 6, 20, 2, 0.2))[0]
        if command == 0:
            tokens = text(MOST_TOKENS + 1)
            world.admit(which, tokens, chance.choice((len(tokens) - 1, chance.randrange(25))), chance.random() < 0.2)
        elif command == 1:
            world.write(which, text(8))
        elif command == 2:
            world.extend(which, chance.choice((MOST_TOKENS, chance.randrange(8))))
        elif command == 3:
            world.drop(which)
        elif command == 4:
            world.fork(which)
        elif command == 5:
            world.release(which)
        elif command == 6:
            world.evict([chance.randrange(max(1, count // chance.choice((1, 2, 4)))) for count in NUM_BLOCKS])
        else:
            world.clear()
        if step % 4 == 0:
            world.check()
    world.finish()
    return world


@pytest.mark.parametrize("seed", range(8))
def test_thousands_of_commands_leave_every_block_with_its_content(seed):
    stats = run_commands(seed, 2500).tree.stats
    assert stats.hit_tokens > 300 and stats.evicted_nodes > 300, "the commands reach neither hits nor evictions"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_millions_of_commands_leave_every_block_with_its_content(seed):
    for part in range(20):
        run_commands(1000 * seed + part, 5000)
