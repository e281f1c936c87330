# SPDX-License-Identifier: Apache-2.0
"""Engines that draft: answers are those without drafts, in company, from the cache, preempted, ruled or forked."""

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
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
