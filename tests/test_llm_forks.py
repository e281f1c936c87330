# SPDX-License-Identifier: Apache-2.0
"""Branches of one prompt through the door: each is the answer that its whole prompt has alone."""

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import RequestError
from tests.conftest import GOLDENS

MODELS = {
    "llama-default": {"prefix_cache": False},
    "mistral-window": {"proposer": "ngram", "num_drafts": 3, "draft_mode": "always"},
    "bamba": {},
}
BRANCHES = [
    ((), {"temperature": 0}),
    ((7, 9, 11), {"temperature": 1.0, "seed": 3}),
    ((), {"temperature": 1.0, "seed": 4, "logprobs": 1}),
    ((5,), {"temperature": 0, "stop_token_ids": [6]}),
]


def run(llm, answers):
    while llm.step():
        llm.engine.check()
    return [answer.result() for answer in answers]


@pytest.fixture(scope="module", params=MODELS)
def llm(request):
    return LLM(
        GOLDENS / request.param, max_context_tokens=128, max_sequences=4, prefill_tokens=64, **MODELS[request.param]
    )


def branches(llm, stem):
    made = []
    for suffix, params in BRANCHES:
        made.append(llm.prepare([*stem, *suffix], SamplingParams(max_tokens=8, ignore_eos=True, **params)))
    return made


def test_branches_are_what_their_prompts_give_alone_and_share_a_beginning(llm):
    stem = np.random.default_rng(1).integers(3, 60, 37).tolist()
    prepared = branches(llm, stem)
    before = llm.stats()
    results = run(llm, llm.submit_forks(prepared, len(stem)))
    after = llm.stats()
    assert [result.usage.cached_tokens for result in results] == [0, 37, 37, 37]
    computed = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    assert computed == len(stem) + sum(len(suffix) for suffix, _ in BRANCHES)
    for one, result in zip(prepared, results, strict=True):
        alone = run(llm, [llm.submit_prepared(one)])[0]
        assert alone.token_ids == result.token_ids and len(result.token_ids) > 1
    assert len(results[2].logprobs) == 8


def test_a_branch_that_is_cancelled_leaves_the_others_theirs(llm):
    stem = np.random.default_rng(2).integers(3, 60, 70).tolist()  # in two chunks
    for gone in range(len(BRANCHES)):
        prepared = branches(llm, [gone + 3, *stem])
        answers = llm.submit_forks(prepared, 1 + len(stem))
        llm.step()
        answers[gone].cancel(llm.engine)
        results = run(llm, answers)
        for index, (one, result) in enumerate(zip(prepared, results, strict=True)):
            if index == gone:
                assert result.finish_reason == "abort"
            else:
                assert run(llm, [llm.submit_prepared(one)])[0].token_ids == result.token_ids
    llm.engine.check()


@pytest.mark.parametrize(
    "prompts, shared, params, field",
    [
        ([[3, 4], [3, 5]], 2, {}, "prompt"),
        ([[3, 4], [3]], 2, {}, "prompt"),
        ([[3, 4]] * 5, 2, {}, "branches"),
        ([], 2, {}, "branches"),
        ([[3, 4]], 0, {}, "prompt"),
        ([[3, 4]], 2, {"n": 2}, "n"),
        ([[3, 4]], 2, {"beam_width": 2}, "beam_width"),
    ],
)
def test_what_is_no_branch_of_one_prompt_is_told(llm, prompts, shared, params, field):
    with pytest.raises(RequestError) as told:
        llm.submit_forks([llm.prepare(prompt, SamplingParams(**params)) for prompt in prompts], shared)
    assert told.value.field == field


def test_branches_of_other_salts_share_nothing(llm):
    salted = [llm.prepare([3, 4], SamplingParams(cache_salt=salt)) for salt in "ab"]
    with pytest.raises(RequestError, match="branch 1 has another cache_salt"):
        llm.submit_forks(salted, 2)
