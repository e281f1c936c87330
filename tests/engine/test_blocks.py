# SPDX-License-Identifier: Apache-2.0
"""Reference counts under random commands, against a plain model of them."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrale_jax.engine.blocks import BlockAllocator

NUM_BLOCKS = 12


class BlockMachine(RuleBasedStateMachine):
    """Holders are lists of blocks, with holes; the model is how many of them name a block."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.holders = []

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.allocator.num_free))
        taken = self.allocator.allocate(count)
        held = {block for holder in self.holders for block in holder}
        assert len(set(taken)) == count and 0 not in taken and not held & set(taken)
        self.holders.append([*taken, 0])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.allocator.share(holder)
        self.holders.append(list(holder))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.allocator.release(self.holders.pop(index))

    @invariant()
    def counts_agree(self):
        self.allocator.check()
        counts = Counter(block for holder in self.holders for block in holder if block)
        assert self.allocator.num_free == NUM_BLOCKS - 1 - len(counts)
        for block in range(1, NUM_BLOCKS):
            assert self.allocator.shared(block) == (counts[block] > 1)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_block_zero_is_never_given_out():
    allocator = BlockAllocator(4)
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert allocator.num_free == 0
    assert allocator.num_usable == 3


def test_more_than_is_free_is_our_own_mistake():
    allocator = BlockAllocator(4)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 free"):
        allocator.allocate(4)


def test_releasing_or_sharing_what_nobody_holds_is_our_own_mistake():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(1)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="released but nobody holds it"):
        allocator.release(blocks)
    with pytest.raises(AssertionError, match="shared but nobody holds it"):
        allocator.share(blocks)


def test_check_sees_a_block_that_is_free_and_held():
    allocator = BlockAllocator(4)
    allocator._free.append(allocator.allocate(1)[0])
    with pytest.raises(AssertionError):
        allocator.check()
