# SPDX-License-Identifier: Apache-2.0
"""States are values: batches are made of them, an old one stays valid, a fork goes its own way."""

import jax
import numpy as np
import pytest

from metrale_jax.core.sequence import select_rows, stack_states
from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import Lease
from metrale_jax.generate import first_state
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import abstract_pool

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9)


def alone(bench, row, prompt, count):
    pool, rows, first = bench.prefill(bench.pool(), [row], [prompt])
    return [int(first[0]), *bench.decode(pool, rows, count)[2][0].tolist()]


def test_stacking_and_selecting_go_there_and_back(bench):
    bench = bench("gemma2")
    rows = [bench.row(i, 10 + i, SAMPLED, i) for i in range(3)]
    batch = stack_states(rows)
    assert batch.seq_len.shape == (3,) and batch.block_tables[1].shape == (3, 8)
    for index, row in enumerate(rows):
        jax.tree.map(np.testing.assert_array_equal, select_rows(batch, [index]), row)
    back = stack_states([select_rows(batch, [2]), select_rows(batch, [0, 1])])
    jax.tree.map(np.testing.assert_array_equal, back, select_rows(batch, [2, 0, 1]))


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_rows_run_alike_in_any_batch_and_order(bench, name):
    bench = bench(name)
    prompts = [bench.prompt[:30], bench.prompt[30:37], bench.prompt[40:52]]
    rows = [bench.row(i, len(p), SAMPLED if i else GREEDY, i) for i, p in enumerate(prompts)]
    pool, rows, _ = bench.prefill(bench.pool(), rows, prompts)
    pool, _, expected = bench.decode(pool, rows, 6)
    for order in ([2, 0, 1], [1], [2, 1]):
        pool, _, tokens = bench.decode(pool, [rows[i] for i in order], 6)
        np.testing.assert_array_equal(tokens, expected[order])


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_an_old_state_stays_valid_after_later_steps(bench, name):
    bench = bench(name)
    prompts = [bench.prompt[:30], bench.prompt[30:37]]
    rows = [bench.row(i, len(p), SAMPLED if i else GREEDY, i) for i, p in enumerate(prompts)]
    pool, old, _ = bench.prefill(bench.pool(), rows, prompts)
    pool, middle, first = bench.decode(pool, old, 4)
    pool, _, second = bench.decode(pool, middle, 6)
    expected = np.concatenate([first, second], axis=1)
    pool, _, again = bench.decode(pool, old, 10)
    np.testing.assert_array_equal(again, expected)
    _, _, tail = bench.decode(pool, middle, 6)
    np.testing.assert_array_equal(tail, second)


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_forks_diverge_and_each_is_its_own_solo(bench, name):
    bench = bench(name)
    prompt, seeds, count = bench.prompt[:21], (3, 4, 5), 12
    expected = [alone(bench, bench.row(0, 21, SAMPLED, seed), prompt, count - 1) for seed in seeds]
    assert len({tuple(tokens) for tokens in expected}) == 3
    groups = bench.layout.groups
    # Windows of 0: what one fork may drop is another test's concern.
    allocators = tuple(BlockAllocator(73) for _ in groups)
    allocators[0].allocate(5)  # Groups need not agree on ids.
    leases = [Lease(allocators, (0,) * len(groups), 8)]
    leases[0].grow(20, 0)
    first = with_tables(bench.row(0, 21, SAMPLED, seeds[0]), leases[0])
    # The prompt's last token is each fork's first input, so that each draws its own first token.
    pool, (state,), _ = bench.prefill(bench.pool(), [first], [prompt[:20]])
    leases += [leases[0].fork(), leases[0].fork()]
    copies = [copy for lease in leases for copy in lease.grow(20 + count, 20)]
    assert len(copies) == 2 * len(groups), "the last holder keeps the block"
    sides = [
        tuple(np.asarray([getattr(c, side) for c in copies if c.group == g], np.int32) for g in range(len(groups)))
        for side in ("source", "target")
    ]
    pool = bench.golden.steps.run("copy_blocks", pool, *sides)
    forks = []
    for lease, seed in zip(leases, seeds, strict=True):
        sampling = state.sampling.replace(seed=np.asarray([seed], np.uint32))
        last = np.asarray([prompt[20]], np.int32)
        forks.append(with_tables(state.replace(sampling=sampling, last_token=last), lease))
    _, _, tokens = bench.decode(pool, forks, count)
    assert tokens.tolist() == expected
    for lease in leases:
        lease.release()
    for allocator in allocators:
        allocator.check()
    assert allocators[-1].num_free == (72 if len(groups) > 1 else 67)


def with_tables(state, lease):
    tables = tuple(np.asarray([[*blocks, *[0] * (8 - len(blocks))]], np.int32) for blocks in lease.tables)
    return state.replace(block_tables=tables)


def test_the_pool_is_donated_to_each_step_and_written_in_place(bench):
    bench = bench("gemma2")
    pool = bench.pool()
    old = jax.tree.leaves(pool)
    num_bytes = sum(leaf.nbytes for leaf in old)
    pool, rows, _ = bench.prefill(pool, [bench.row(0, 9)], [bench.prompt[:9]])
    assert all(leaf.is_deleted() for leaf in old)
    middle = jax.tree.leaves(pool)
    state = bench.padded(rows, 8)
    compiled = bench.golden.steps.executable("decode", bench.golden.params, pool, state, num_logprobs=0)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
    pool, after, _ = bench.run("decode", pool, state)
    assert all(leaf.is_deleted() for leaf in middle)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pool))
    assert int(after.seq_len[0]) == 10 and state.seq_len[0] == 9, "the old state is untouched"


def places_written(before, pool):
    """(block, token) pairs, block 0 apart, whose contents differ in any layer."""
    places = set()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(pool), strict=True):
        new = np.asarray(new)
        written = (new != old) & ~(np.isnan(old) & np.isnan(new))
        places |= {(int(b), int(t)) for b, t in np.argwhere(written.any(axis=(0, 3, 4))) if b}
    return places


def test_a_step_writes_its_tokens_and_nothing_else(bench):
    bench = bench("gemma2")
    pool = bench.pool()
    before = jax.tree.map(np.asarray, pool)
    # As many prompts as rows: padding tokens come right after the last of them.
    pool, rows, _ = bench.prefill(
        pool, [bench.row(i, 9) for i in range(4)], [bench.prompt[i : i + 9] for i in range(4)]
    )
    assert places_written(before, pool) == {(8 * i + 1 + t // 8, t % 8) for i in range(4) for t in range(9)}
    before = jax.tree.map(np.asarray, pool)
    pool, _, _ = bench.decode(pool, rows[1:2], 3)
    assert places_written(before, pool) == {(10, 1), (10, 2), (10, 3)}, "the second block of the second row"


@pytest.mark.parametrize("num_rows", [1, 12])
def test_a_step_over_a_long_context_makes_no_copy_of_the_pool(golden, num_rows):
    """A past of several tiles is walked in a loop, beside which XLA may copy what the loop reads."""
    model = golden("llama-default")
    one = first_state(model.layout, 0, 64, SamplingParams(temperature=0), 0, (), model.config.vocab_size)
    state = stack_states([one] * num_rows)
    pool = abstract_pool(model.layout, (20_000,) * len(model.layout.groups))
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    chunk = (np.zeros(256, np.int32), np.zeros(num_rows, np.int32))
    for name, extra in (("decode", ()), ("prefill", chunk)):
        compiled = model.steps.executable(name, model.params, pool, state, *extra)
        assert compiled.memory_analysis().temp_size_in_bytes < smallest, name
