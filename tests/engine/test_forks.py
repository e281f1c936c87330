# SPDX-License-Identifier: Apache-2.0
"""Branches of one prompt: the prompt runs once, and each answer is that of the branch's whole prompt alone."""

from dataclasses import replace

import numpy as np
import pytest

from metrale_jax import SamplingParams
from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import Ask, admitted
from tests.engine.conftest import LONG, Counting

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12)
SHARED = 53
# What each branch adds to the shared prompt, and how it goes on.
BRANCHES = (
    (9, GREEDY),
    (0, SAMPLED),
    (1, replace(SAMPLED, repetition_penalty=1.4)),
    (30, replace(GREEDY, max_tokens=5)),
    (0, replace(GREEDY, logit_bias={17: 3.5})),
)
MODELS = ["llama-default", "mistral-window"]


def tokens_of(kit, length, seed):
    return np.random.default_rng(seed).integers(3, kit.golden.config.vocab_size, length).tolist()


def jobs_of(kit, branches=BRANCHES, shared=SHARED, seed=0):
    prompt = tokens_of(kit, shared, seed)
    return [
        kit.job([*prompt, *tokens_of(kit, own, 100 + seed + place)], params, seed=40 + place)
        for place, (own, params) in enumerate(branches)
    ]


def submit(engine, jobs, shared=SHARED):
    asks = [Ask(job.prompt, job.params, [job.seed], job.eos_token_ids) for job in jobs]
    return engine.enqueue_forks([admitted(ask, engine.limits) for ask in asks], shared, [None] * len(asks))


def assert_solo(kit, jobs, requests):
    for place, (job, request) in enumerate(zip(jobs, requests, strict=True)):
        assert request.output == kit.solo(job), f"branch {place}: {request.error}"


def strangers(kit, count=3):
    for place in range(count):
        yield kit.job(tokens_of(kit, 9 + 7 * place, 700 + place), replace(SAMPLED, max_tokens=20), seed=900 + place)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 3, 0, 4, 2)])
@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_branches_are_requests_of_their_own_and_run_what_they_share_once(kit, name, cache, chunk, order):
    kit = kit(name, config=LONG)
    jobs = [jobs_of(kit)[place] for place in order]
    engine = kit.engine(chunk, prefix_cache=cache)
    engine.device = Counting(engine.device)
    requests = submit(engine, jobs)
    kit.finish(engine)
    assert engine.device.prompt_tokens == SHARED + sum(len(job.prompt) - SHARED for job in jobs)
    assert_solo(kit, jobs, requests)
    assert [request.cached_tokens for request in requests] == [0] + [SHARED] * 4


@pytest.mark.parametrize("name", MODELS)
def test_branches_in_company_and_thrown_out_give_the_same(kit, name):
    kit = kit(name, config=LONG)
    jobs, others = jobs_of(kit, seed=3), list(strangers(kit))
    engine = kit.engine(16, 26)
    neighbours = [kit.submit(engine, other) for other in others]
    requests = submit(engine, jobs)
    kit.finish(engine)
    assert_solo(kit, [*jobs, *others], [*requests, *neighbours])
    assert sum(request.num_preemptions for request in [*requests, *neighbours]) > 0


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("after", range(0, 10, 2))
def test_cancelling_a_branch_leaves_the_others_right(kit, after, victim):
    kit = kit("llama-default", config=LONG)
    jobs, others = jobs_of(kit), list(strangers(kit, 2))
    engine = kit.engine(16)
    neighbours = [kit.submit(engine, other) for other in others]
    requests = submit(engine, jobs)
    for _ in range(after):
        engine.step()
    engine.cancel(requests[victim])
    kit.finish(engine)
    left = [place for place in range(len(jobs)) if place != victim]
    assert_solo(kit, [jobs[place] for place in left], [requests[place] for place in left])
    assert_solo(kit, others, neighbours)


def test_branches_of_a_prompt_that_is_cached_further_than_they_share_are_right(kit):
    kit = kit("llama-default", config=LONG)
    jobs = jobs_of(kit)
    engine = kit.engine(128)
    first = kit.submit(engine, jobs[3])
    while not first.finished:
        engine.step()
    requests = submit(engine, [jobs[3], *jobs[:3]])
    while engine.step():
        pass
    assert_solo(kit, [jobs[3], *jobs[:3]], requests)
    assert all(request.cached_tokens >= SHARED // 8 * 8 for request in requests)
    again = submit(engine, jobs)
    kit.finish(engine)
    assert_solo(kit, jobs, again)


def test_a_step_that_fails_at_the_fork_fails_its_branches_and_nobody_else(kit):
    kit = kit("llama-default", config=LONG)
    jobs, others = jobs_of(kit), list(strangers(kit, 2))
    engine = kit.engine(128)
    real, calls = engine.device.copy_slots, []
    keeps = engine.device.copy_blocks

    def fail(*given):
        calls.append(given)
        raise RuntimeError("no room")

    engine.device.copy_blocks = fail
    requests = submit(engine, jobs)
    for _ in range(3):
        engine.step()
    engine.device.copy_blocks, engine.device.copy_slots = keeps, real
    neighbours = [kit.submit(engine, other) for other in others]
    kit.finish(engine)
    assert calls and any(request.finish_reason == "error" for request in requests)
    assert_solo(kit, others, neighbours)


def test_branches_that_cannot_fork_are_refused(kit):
    kit = kit("llama-default", config=LONG)
    engine = kit.engine()
    jobs = jobs_of(kit)
    other = replace(jobs[1], prompt=(5, *jobs[1].prompt[1:]))
    for wrong, shared, field in (
        ([jobs[0], other], SHARED, "prompt"),
        (jobs, 0, "prompt"),
        (jobs, SHARED + 1, "prompt"),
        ([], 1, "branches"),
        (jobs * 2, SHARED, "branches"),
        ([jobs[0], replace(jobs[1], params=replace(GREEDY, beam_width=2))], SHARED, "beam_width"),
    ):
        with pytest.raises(RequestError) as caught:
            submit(engine, wrong, shared)
        assert caught.value.field == field
    assert not engine.has_work
