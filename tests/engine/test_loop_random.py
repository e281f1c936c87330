# SPDX-License-Identifier: Apache-2.0
"""Loads in any order: submit, cancel and step at random with few blocks, then run to the end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.sampling.params import SamplingParams

POOL_OF_PROMPTS = 12
# Solo answers are remembered: a few jobs drawn again and again cost little.
SUBMIT = st.tuples(st.just("submit"), st.integers(0, POOL_OF_PROMPTS - 1))
STEP = st.tuples(st.just("step"), st.integers(1, 7))
COMMANDS = st.one_of(SUBMIT, SUBMIT, SUBMIT, STEP, STEP, st.tuples(st.just("cancel"), st.integers(0, 30)))


def jobs_of(kit):
    rng = np.random.default_rng(7)
    for index in range(POOL_OF_PROMPTS):
        length = int(rng.choice([1, 7, 8, 15, 16, 23, 30, 31, 32, 33, 47]))
        params = SamplingParams(
            temperature=float(index % 3) * 0.5,
            top_p=0.95,
            max_tokens=int(rng.integers(1, 24)),
            min_tokens=index % 2,
        )
        # Half of the vocabulary ends an answer, so that many end while a step is under way.
        yield kit.job(rng.integers(3, 131, length), params, index, tuple(range(2, 10)) if index % 4 else ())


@pytest.mark.parametrize("name", [pytest.param("llama-default", marks=pytest.mark.slow), "gemma2", "phi3-longrope"])
@pytest.mark.parametrize(("prefill_tokens", "usable_blocks"), [(16, 9), (64, 13)])
def test_any_order_of_events_gives_solo_answers(kit, name, prefill_tokens, usable_blocks):
    kit = kit(name)
    jobs = list(jobs_of(kit))
    preempted = []

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.lists(COMMANDS, min_size=15, max_size=40))
    def run(commands):
        engine = kit.engine(prefill_tokens, usable_blocks)
        submitted = []
        for command, value in commands:
            if command == "submit":
                submitted.append((jobs[value], kit.submit(engine, jobs[value])))
            elif command == "cancel" and submitted:
                engine.cancel(submitted[value % len(submitted)][1])
            elif command == "step":
                for _ in range(value):
                    engine.step()
            engine.check()
            assert_sound(engine)
        kit.finish(engine)
        for job, request in submitted:
            solo = kit.solo(job)
            if request.finish_reason == "abort":
                assert request.output == solo[: len(request.output)]
            else:
                assert request.output == solo
                assert request.finish_reason == ("stop" if solo[-1] in request.stop_ids else "length")
        preempted.append(sum(request.num_preemptions for _, request in submitted))

    run()
    assert any(preempted), "some load was too much for the blocks"


def assert_sound(engine):
    """Every block is held by leases or the tree, every request is in one place."""
    busy = [*engine.filling, *engine.running.values()]
    places = [*engine.waiting, *busy]
    assert len({request.request_id for request in places}) == len(places)
    assert not any(request.finished for request in places)
    assert not any(request.lease for request in engine.waiting)
    for group, allocator in enumerate(engine.memory.allocators):
        held = {block for request in busy for block in request.lease.tables[group] if block}
        free_or_kept = allocator.num_free + engine.memory.tree.stats.num_blocks[group]
        assert free_or_kept <= allocator.num_usable <= free_or_kept + len(held)
