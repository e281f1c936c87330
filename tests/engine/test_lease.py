# SPDX-License-Identifier: Apache-2.0
"""Leases under random commands: what each holder wrote is what it reads, whoever else writes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import AbstractPin, Lease

BLOCK_SIZE = 4
WINDOWS = (0, 6)
NUM_BLOCKS = 14


def new_allocators(num_blocks=NUM_BLOCKS):
    return tuple(BlockAllocator(num_blocks) for _ in WINDOWS)


def new_lease(allocators):
    return Lease(allocators, WINDOWS, BLOCK_SIZE)


class LeaseMachine(RuleBasedStateMachine):
    """Each live lease goes with the tokens it wrote; `memory[group]` plays the pool, a value for each slot."""

    def __init__(self):
        super().__init__()
        self.allocators = new_allocators()
        self.memory = [{} for _ in WINDOWS]
        self.live = []
        self.counter = 0

    @precondition(lambda self: len(self.live) < 5)
    @rule()
    def begin(self):
        self.live.append((new_lease(self.allocators), []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def write(self, data, count):
        lease, written = data.draw(st.sampled_from(self.live))
        if not lease.can_grow(len(written) + count, len(written)):
            return
        for copy in lease.grow(len(written) + count, len(written)):
            assert copy.source != copy.target
            for offset in range(BLOCK_SIZE):
                value = self.memory[copy.group].get((copy.source, offset))
                self.memory[copy.group][copy.target, offset] = value
        for _ in range(count):
            self.counter += 1
            for group, table in enumerate(lease.tables):
                block = table[len(written) // BLOCK_SIZE]
                assert block and not self.allocators[group].shared(block), "a write reaches other holders"
                self.memory[group][block, len(written) % BLOCK_SIZE] = self.counter
            written.append(self.counter)

    @precondition(lambda self: 0 < len(self.live) < 5)
    @rule(data=st.data())
    def fork(self, data):
        lease, written = data.draw(st.sampled_from(self.live))
        self.live.append((lease.fork(), list(written)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        lease, written = data.draw(st.sampled_from(self.live))
        free = [allocator.num_free for allocator in self.allocators]
        dropped = lease.drop_behind_windows(len(written))
        assert dropped or free == [allocator.num_free for allocator in self.allocators]
        assert not lease.drop_behind_windows(len(written)), "a second time there is nothing left to drop"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        lease, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        lease.release()

    @invariant()
    def every_holder_reads_what_it_wrote(self):
        for group, window in enumerate(WINDOWS):
            self.allocators[group].check()
            for lease, written in self.live:
                first = max(0, len(written) - window + 1) if window else 0
                for token in range(first, len(written)):
                    block = lease.tables[group][token // BLOCK_SIZE]
                    assert self.memory[group][block, token % BLOCK_SIZE] == written[token]
            held = {block for lease, _ in self.live for block in lease.tables[group] if block}
            assert self.allocators[group].num_free == NUM_BLOCKS - 1 - len(held)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_only_blocks_that_no_later_token_sees_are_dropped():
    allocators = new_allocators()
    lease = new_lease(allocators)
    lease.grow(20, 0)
    # The token at position 13 sees positions 8 to 13 of a window of 6.
    assert lease.drop_behind_windows(13)
    assert [bool(block) for block in lease.tables[1]] == [False, False, True, True, True]
    assert all(lease.tables[0])


def test_whether_it_can_grow_is_exact():
    allocators = new_allocators(4)
    lease = new_lease(allocators)
    assert lease.can_grow(12, 0)
    assert not lease.can_grow(13, 0)
    lease.grow(12, 0)
    assert lease.can_grow(12, 11), "no block is free and none is needed"
    lease.release()
    lease = new_lease(allocators)
    lease.grow(6, 0)
    other = lease.fork()
    assert other.can_grow(7, 6), "one copy"
    assert not other.can_grow(9, 6), "one copy and one more block"
    other.release()
    assert lease.can_grow(9, 6), "the last holder writes without a copy"


def test_a_fork_copies_the_block_it_writes_to_and_shares_the_rest():
    allocators = new_allocators()
    lease = new_lease(allocators)
    lease.grow(6, 0)
    other = lease.fork()
    copies = other.grow(7, 6)
    assert [(copy.group, copy.source) for copy in copies] == [(0, lease.tables[0][1]), (1, lease.tables[1][1])]
    assert [table[0] for table in other.tables] == [table[0] for table in lease.tables]
    assert lease.grow(7, 6) == [], "the first holder is alone with its block again"


def test_a_lease_is_released_once_and_not_used_after():
    lease = new_lease(new_allocators())
    lease.grow(3, 0)
    lease.release()
    for use in (lease.release, lease.fork, lambda: lease.grow(1, 0)):
        with pytest.raises(AssertionError):
            use()


class CountedPin(AbstractPin):
    """A pin that knows how many there are."""

    def __init__(self, count):
        self.count = count
        count[0] += 1

    def fork(self):
        return CountedPin(self.count)

    def release(self):
        self.count[0] -= 1


def test_a_lease_on_cached_blocks_goes_on_after_them_and_copies_none_of_them():
    allocators = new_allocators()
    owner = new_lease(allocators)
    owner.grow(8, 0)
    for allocator, table in zip(allocators, owner.tables, strict=True):
        allocator.share(table)
    lease = Lease(allocators, WINDOWS, BLOCK_SIZE, [list(table) for table in owner.tables], pin=CountedPin([0]))
    assert lease.wanted(13, 8) == (2, 2) and lease.grow(13, 8) == []
    assert [table[:2] for table in lease.tables] == owner.tables
    owner.release()
    lease.release()
    assert [allocator.num_free for allocator in allocators] == [NUM_BLOCKS - 1] * 2


def test_what_a_lease_wants_is_told_group_by_group():
    lease = new_lease(new_allocators())
    lease.grow(14, 0)
    lease.drop_behind_windows(14)
    other = lease.fork()
    assert other.wanted(16, 4) == (3, 2), "a hole is not copied"
    assert other.wanted(17, 14) == (2, 2)


def test_a_lease_has_one_pin_and_gives_it_back_once():
    count = [0]
    lease = Lease(new_allocators(), WINDOWS, BLOCK_SIZE, pin=CountedPin(count))
    other = lease.fork()
    assert count == [2]
    lease.release()
    assert count == [1]
    with pytest.raises(AssertionError):
        lease.release()
    assert count == [1] and other.pin is not lease.pin
    other.release()
    assert count == [0]
