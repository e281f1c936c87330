# SPDX-License-Identifier: Apache-2.0
"""Engines that draft: answers are those without drafts, in company, from the cache, preempted, ruled or forked."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.engine.drafting import Drafting, Timing
from tests.conftest import GOLDENS
from tests.sometimes import mostly_slow

OPTIONS = {"max_sequences": 4, "max_context_tokens": 128, "kv_cache_mib": 2, "prefill_tokens": 64}
MODELS = mostly_slow(["qwen3-next-dense", "mistral-window", "llama-default", "gpt-oss"], ["qwen3-next-dense"])
SEVERAL = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, max_tokens=30, frequency_penalty=0.3),
    SamplingParams(temperature=0.7, seed=6, max_tokens=17, min_tokens=9, stop_token_ids=[5, 9]),
    SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=list(range(20, 60))),
    SamplingParams(temperature=1.1, seed=8, max_tokens=20, n=3),
]


def told(results):
    """All that a caller sees of answers but how long they took and what was cached."""
    return [(c.token_ids, c.finish_reason, c.logprobs) for result in results for c in result.choices]


@pytest.fixture(scope="module", params=MODELS)
def engines(request):
    """Engines of one model, without and with drafts, and prompts with passages that come again."""
    path = GOLDENS / request.param
    plain = LLM(path, **OPTIONS, prefix_cache=False)
    drafting = LLM(path, **OPTIONS, proposer="ngram", num_drafts=3, draft_mode="always")
    rng = np.random.default_rng(1)
    vocab = plain.loaded.config.vocab_size
    prompts = []
    for length in (9, 17, 33, 21, 12, 40):
        part = rng.integers(3, vocab, length).tolist()
        prompts.append([*part, *part[: length // 2]])
    return plain, drafting, prompts


def assert_same(got, expected):
    assert [one[:2] for one in got] == [one[:2] for one in expected]
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours[2] or (), theirs[2] or (), strict=True):
            assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4


def test_in_company_and_again_from_the_cache(engines):
    plain, drafting, prompts = engines
    expected = [told(plain.generate([prompt], params)) for prompt, params in zip(prompts, SEVERAL, strict=True)]
    for _ in range(2):
        results = drafting.generate(prompts, SEVERAL)
        assert_same(told(results), [answer for answers in expected for answer in answers])
        drafting.engine.check()
    stats = drafting.stats().drafts
    assert 0 < stats.accepted < stats.proposed
    assert results[2].usage.cached_tokens > 0


def test_the_next_turn_finds_what_stands_and_nothing_of_rejected_drafts(engines):
    plain, drafting, prompts = engines
    params = replace(SEVERAL[2], max_tokens=40)
    first = drafting.generate([prompts[5]], params)[0]
    turn = [*prompts[5], *first.token_ids, 9, 8, 7]
    expected = plain.generate([turn], SEVERAL[0])
    found = drafting.generate([turn], SEVERAL[0])
    assert_same(told(found), told(expected))
    assert found[0].usage.cached_tokens > len(prompts[5])


def test_answers_end_at_their_limits_and_no_length_of_drafts_is_compiled_anew(engines):
    plain, drafting, prompts = engines
    params = [replace(SEVERAL[0], max_tokens=count, ignore_eos=True) for count in (4, 9, 3, 6)]
    drafting.generate(prompts[:4], params)
    compiled = drafting.stats().num_compiles
    for shift in range(1, 4):
        each = [replace(one, max_tokens=one.max_tokens + shift) for one in params]
        results = drafting.generate(prompts[:4], each)
        assert [len(result.token_ids) for result in results] == [one.max_tokens for one in each]
        assert_same(told(results), told(plain.generate(prompts[:4], each)))
    assert drafting.stats().num_compiles == compiled


def test_the_first_run_of_a_program_is_no_measure_of_it():
    times = []
    policy = SimpleNamespace(record=lambda width, rows, seconds, outcomes: times.append((width, seconds)))
    drafting = Drafting(policy, None, None)
    for width, began, read_at in ((0, 0.0, 9.0), (0, 9.0, 10.0), (3, 10.0, 30.0), (3, 31.0, 33.0)):
        drafting.read(Timing(began, width, 1, 5), [], np.zeros(0), np.zeros(0), read_at, compiles=5)
    assert times == [(0, None), (0, 1.0), (3, None), (3, 2.0)]
