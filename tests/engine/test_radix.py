# SPDX-License-Identifier: Apache-2.0
"""The radix tree: what is found, what is kept, and what goes first."""

import pytest

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import Lease
from metrale_jax.engine.leaves import DOUBLING_TOKENS
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree

SIZE = 4


class Bench:
    """A tree over fresh allocators, and leases as the engine would hold them."""

    def __init__(self, windows=(0,), num_blocks=33, size=SIZE):
        self.windows, self.size = windows, size
        self.allocators = tuple(BlockAllocator(num_blocks) for _ in windows)
        self.tree = RadixTree(self.allocators, windows, size)

    def begin(self, tokens, namespace=None, most=None):
        """A lease on what is cached of `tokens`, and how many tokens that is."""
        match = self.tree.match(namespace, tokens, len(tokens) if most is None else most)
        pin = Pin(self.tree, match.node)
        return Lease(self.allocators, self.windows, self.size, match.tables, pin=pin), match.num_tokens

    def run(self, tokens, namespace=None, drop=False):
        """A lease that has written and kept all `tokens`; with `drop` what its windows left behind was gone before."""
        lease, cached = self.begin(tokens, namespace)
        lease.grow(len(tokens), cached)
        if drop:
            lease.drop_behind_windows(len(tokens))
        lease.pin.extend(tokens[cached:], lease.tables)
        self.tree.check()
        return lease

    def keep(self, tokens, namespace=None, drop=False):
        """The tables with which `tokens` are cached by a request that has ended."""
        lease = self.run(tokens, namespace, drop)
        tables = [list(table) for table in lease.tables]
        lease.release()
        self.tree.check()
        return tables

    def cached(self, tokens, namespace=None):
        """How many of `tokens` are cached, asked without a trace but in the statistics and the order of eviction."""
        lease, cached = self.begin(tokens, namespace)
        lease.release()
        return cached

    @property
    def free(self):
        return [allocator.num_free for allocator in self.allocators]


def tokens_of(length, first=0):
    return list(range(first, first + length))


def test_an_empty_tree_matches_nothing_and_forgets_who_asked():
    bench = Bench()
    lease, cached = bench.begin(tokens_of(9), "tenant")
    assert cached == 0 and lease.tables == [[]]
    lease.release()
    bench.tree.check()
    assert not bench.tree._roots, "a root without pins or children stays behind"


def test_written_blocks_are_found_again_as_whole_blocks():
    bench = Bench()
    tables = bench.keep(tokens_of(11))
    lease, cached = bench.begin([*tokens_of(8), 99, 99, 99, 99])
    assert cached == 8 and lease.tables == [tables[0][:2]]
    assert all(bench.allocators[0].shared(block) for block in lease.tables[0])


def test_a_match_stops_at_the_most_tokens_asked_for():
    bench = Bench()
    bench.keep(tokens_of(12))
    for most, cached in ((12, 12), (11, 8), (4, 4), (3, 0), (0, 0), (-1, 0)):
        lease, found = bench.begin(tokens_of(12), most=most)
        assert found == cached
        lease.release()
    bench.tree.check()


def test_equal_blocks_after_unequal_ones_are_different_blocks():
    bench = Bench()
    bench.keep([1, 1, 1, 1, 5, 5, 5, 5])
    assert bench.cached([2, 2, 2, 2, 5, 5, 5, 5]) == 0
    assert bench.cached([5, 5, 5, 5]) == 0


def test_namespaces_share_nothing():
    bench = Bench()
    bench.keep(tokens_of(8), ("adapter", 1))
    assert bench.cached(tokens_of(8), ("adapter", 1)) == 8
    assert bench.cached(tokens_of(8), ("adapter", 2)) == 0
    assert bench.cached(tokens_of(8)) == 0


def test_a_matched_block_outlives_the_lease_that_wrote_it_and_the_pressure():
    bench = Bench()
    bench.keep(tokens_of(8))
    reader, _ = bench.begin(tokens_of(8))
    assert not bench.tree.evict([bench.allocators[0].num_usable])
    assert bench.tree.num_evictable == (0,)
    assert bench.cached(tokens_of(8)) == 8
    reader.release()
    assert bench.tree.num_evictable == (2,)
    assert bench.tree.evict([bench.allocators[0].num_usable])


def test_evicting_a_leaf_frees_its_blocks_and_no_more_than_wanted():
    bench = Bench(num_blocks=11)
    bench.keep(tokens_of(16))
    assert bench.free == [6]
    assert bench.tree.evict([7]) and bench.free == [7]
    assert bench.cached(tokens_of(16)) == 12, "the end of a path goes first"
    assert bench.tree.evict([7]) and bench.free == [7], "what is there already needs no eviction"


def test_the_least_recently_used_goes_first():
    bench = Bench()
    first, second, third = tokens_of(4), tokens_of(4, 100), tokens_of(4, 200)
    for tokens in (first, second, third):
        bench.keep(tokens)
    assert bench.cached(first) == 4
    bench.tree.evict([bench.free[0] + 1])
    assert [bench.tree.match(None, tokens, 4).num_tokens for tokens in (first, second, third)] == [4, 0, 4]


def test_uses_that_write_nothing_count_in_their_order():
    bench = Bench()
    for first in (0, 50, 100):
        bench.keep(tokens_of(4, first))
    for first in (50, 0):
        assert bench.cached(tokens_of(4, first)) == 4
    left = []
    for _ in range(3):
        bench.tree.evict([bench.free[0] + 1])
        left.append(sorted(key[0] for root in bench.tree._roots.values() for key in root.children))
    assert left == [[0, 50], [0], []]


def test_a_use_of_the_beginning_does_not_save_the_rest():
    bench = Bench()
    bench.keep(tokens_of(8))
    bench.keep(tokens_of(4, 100))
    assert bench.cached(tokens_of(4)) == 4
    bench.tree.evict([bench.free[0] + 1])
    assert bench.cached(tokens_of(8)) == 4 and bench.cached(tokens_of(4, 100)) == 4


def test_of_two_equally_old_the_one_that_costs_more_to_compute_stays():
    size = DOUBLING_TOKENS // 4
    bench = Bench(size=size)
    bench.keep(tokens_of(5 * size))
    bench.keep([-1] * size)
    bench.tree.evict([bench.free[0] + 1])
    assert bench.cached([-1] * size) == 0, "a block with no past is computed again sooner"
    assert bench.cached(tokens_of(5 * size)) == 5 * size


def test_whatever_it_costs_a_block_that_nobody_uses_goes_in_the_end():
    size = DOUBLING_TOKENS // 4
    bench = Bench(size=size)
    bench.keep(tokens_of(5 * size))
    for turn in range(60):
        bench.keep([-1 - turn] * size)
        bench.tree.evict([20])
    assert bench.cached(tokens_of(5 * size)) < 5 * size


def test_a_fork_goes_on_pinning_what_it_shares():
    bench = Bench()
    lease = bench.run(tokens_of(8))
    other = lease.fork()
    lease.release()
    bench.tree.check()
    assert bench.tree.num_evictable == (0,)
    other.release()
    bench.tree.check()
    assert bench.tree.num_evictable == (2,)


def test_an_equal_block_written_twice_is_kept_once():
    bench = Bench()
    one, two = bench.begin(tokens_of(8))[0], bench.begin(tokens_of(8))[0]
    for lease in (one, two):
        lease.grow(8, 0)
        lease.pin.extend(tokens_of(8), lease.tables)
    bench.tree.check()
    assert bench.tree.stats.num_blocks == (2,) and bench.free == [28]
    assert not any(bench.allocators[0].shared(block) for block in two.tables[0])
    one.release()
    assert bench.tree.num_evictable == (0,), "the second writer pins the first one's blocks"
    two.release()
    assert bench.tree.num_evictable == (2,) and bench.free == [30]


def test_who_wrote_an_equal_block_may_hold_the_kept_one_instead():
    bench = Bench(windows=(0, 5))
    one, two = bench.begin(tokens_of(12))[0], bench.begin(tokens_of(12))[0]
    for lease in (one, two):
        lease.grow(14, 0)
    one.pin.extend(tokens_of(12), one.tables)
    two.pin.extend(tokens_of(4), two.tables)
    assert two.pin.share(0, two.tables)
    two.drop_behind_windows(9)
    two.pin.extend(tokens_of(8, 4), two.tables)
    assert two.pin.share(4, two.tables) and not two.pin.share(4, two.tables)
    bench.tree.check()
    assert two.tables[0][:3] == one.tables[0][:3] and two.tables[0][3] != one.tables[0][3]
    assert two.tables[1] == [0, *one.tables[1][1:3], two.tables[1][3]]
    for lease in (two, one):
        lease.release()
    assert bench.tree.num_evictable == (3, 3) and bench.free == [29, 29]


def test_a_block_that_an_unpinned_holder_shares_is_kept_once_it_is_let_go():
    bench = Bench()
    lease, _ = bench.begin(tokens_of(8))
    lease.grow(8, 0)
    other = lease.fork()
    lease.pin.extend(tokens_of(8), lease.tables)
    assert bench.tree.stats.num_nodes == 0 and lease.pin.num_tokens == 0
    other.release()
    lease.pin.extend(tokens_of(8), lease.tables)
    assert lease.pin.num_tokens == 8
    bench.tree.check()


def test_a_partial_block_is_kept_when_it_is_full():
    bench = Bench()
    lease, _ = bench.begin(tokens_of(6))
    lease.grow(6, 0)
    lease.pin.extend(tokens_of(6), lease.tables)
    assert lease.pin.num_tokens == 4
    lease.grow(9, 6)
    lease.pin.extend(tokens_of(9)[lease.pin.num_tokens :], lease.tables)
    assert lease.pin.num_tokens == 8


def test_a_match_leaves_holes_behind_a_window_and_takes_no_reference_there():
    bench = Bench(windows=(0, 6))
    tables = bench.keep(tokens_of(16))
    lease, cached = bench.begin(tokens_of(16))
    # The token at position 16 sees positions 11 to 16 of a window of 6.
    assert cached == 16 and lease.tables == [tables[0], [0, 0, *tables[1][2:]]]
    assert [bench.allocators[1].shared(block) for block in tables[1]] == [False, False, True, True]
    assert not lease.drop_behind_windows(16)


def test_a_hit_reaches_only_as_deep_as_every_group_allows():
    bench = Bench(windows=(0, 6))
    bench.keep(tokens_of(16), drop=True)
    assert bench.tree.stats.num_blocks == (4, 2)
    assert bench.cached(tokens_of(16)) == 16, "the last window is there"
    assert bench.cached(tokens_of(12)) == 0, "positions 7 and 8 to 11 are seen, and block 1 is a hole"
    assert bench.begin(tokens_of(16), most=15)[1] == 0
    bench.tree.check()


def test_a_shorter_hit_is_taken_where_a_longer_one_has_a_hole():
    bench = Bench(windows=(0, 6))
    bench.keep(tokens_of(8))
    long = bench.run(tokens_of(24), drop=True)
    long.release()
    assert bench.cached(tokens_of(24)) == 24
    assert bench.cached(tokens_of(16)) == 8
    assert bench.tree.stats.num_blocks == (6, 4)


def test_a_hole_is_filled_by_who_computes_the_block_again():
    bench = Bench(windows=(0, 6))
    bench.keep(tokens_of(16), drop=True)
    assert bench.cached(tokens_of(12)) == 0
    before = bench.free
    lease, _ = bench.begin(tokens_of(12))
    lease.grow(12, 0)
    lease.pin.extend(tokens_of(12), lease.tables)
    bench.tree.check()
    lease.release()
    bench.tree.check()
    assert bench.cached(tokens_of(12)) == 12
    assert bench.tree.stats.num_blocks == (4, 4)
    assert bench.free == [before[0], before[1] - 2], "only what fills the holes stays"


def test_eviction_goes_on_until_every_group_has_what_it_wants():
    bench = Bench(windows=(0, 6), num_blocks=9)
    bench.keep(tokens_of(32), drop=True)
    assert bench.tree.num_evictable == (8, 2) and bench.free == [0, 6]
    assert bench.tree.evict([0, 7]) and bench.free == [1, 7]
    assert bench.tree.evict([3, 8]) and bench.free == [3, 8]
    assert not bench.tree.evict([9, 0]) and bench.free == [8, 8]
    bench.tree.check()


def test_what_can_be_evicted_is_counted_without_a_walk():
    bench = Bench(windows=(0, 6))
    held = bench.run(tokens_of(8))
    bench.keep(tokens_of(16), drop=True)
    bench.keep(tokens_of(8, 50))
    assert bench.tree.num_evictable == (4, 4)
    held.release()
    assert bench.tree.num_evictable == (6, 6)


def test_clearing_forgets_pinned_paths_and_leaves_old_leases_harmless():
    bench = Bench()
    bench.keep(tokens_of(8, 50))
    lease = bench.run(tokens_of(8))
    other = lease.fork()
    bench.tree.clear()
    bench.tree.check()
    assert bench.free == [30], "the leases still hold theirs"
    assert bench.cached(tokens_of(8)) == 0 and bench.cached(tokens_of(8, 50)) == 0
    lease.grow(12, 8)
    lease.pin.extend(tokens_of(4, 8), lease.tables)
    third = other.fork()
    assert bench.tree.stats.num_nodes == 0, "an old node is extended by nothing"
    bench.keep(tokens_of(8))
    for held in (lease, other, third):
        held.release()
        bench.tree.check()
    assert bench.cached(tokens_of(8)) == 8 and bench.tree.num_evictable == (2,)


def test_statistics_count_tokens_asked_for_and_found():
    bench = Bench()
    bench.keep(tokens_of(8))
    bench.cached(tokens_of(10))
    bench.tree.evict([32])
    stats = bench.tree.stats
    assert (stats.query_tokens, stats.hit_tokens) == (18, 8)
    assert (stats.num_nodes, stats.num_blocks, stats.evicted_nodes) == (0, (0,), 2)
    bench.tree.clear()
    assert bench.tree.stats == stats


def test_a_path_of_thousands_of_blocks_needs_no_recursion():
    bench = Bench(num_blocks=20_001)
    bench.keep(tokens_of(80_000))
    assert bench.cached(tokens_of(80_000)) == 80_000
    bench.tree.check()
    assert bench.tree.evict([20_000])
    bench.keep(tokens_of(80_000))
    bench.tree.clear()
    assert bench.free == [20_000]


def test_the_queue_of_leaves_does_not_grow_with_use():
    bench = Bench()
    for _ in range(100):
        for first in (0, 50, 100):
            bench.keep(tokens_of(8, first))
    assert len(bench.tree._leaves._heap) <= bench.tree.stats.num_nodes == 6


def test_misuse_of_pins_is_refused():
    bench = Bench()
    lease = bench.run(tokens_of(8))
    pin = lease.pin
    lease.release()
    for use in (pin.release, pin.fork, lambda: pin.extend([], [[]])):
        with pytest.raises(AssertionError):
            use()
    node = bench.tree.match(None, tokens_of(8), 8).node
    bench.tree.release(node)
    for use in (
        lambda: bench.tree.release(node),
        lambda: bench.tree.pin(node),
        lambda: bench.tree.insert(node, [], [[]]),
    ):
        with pytest.raises(AssertionError):
            use()


def test_only_whole_blocks_and_only_windows_leave_holes():
    bench = Bench(windows=(0, 6))
    node = bench.tree.match(None, [], 0).node
    with pytest.raises(AssertionError, match="whole blocks"):
        bench.tree.insert(node, [1, 2, 3], [[1], [1]])
    with pytest.raises(AssertionError, match="only a window"):
        bench.tree.insert(node, [1, 2, 3, 4], [[0], [0]])
