# SPDX-License-Identifier: Apache-2.0
"""Drafts of another model against that model by itself, and answers that they do not change."""

from dataclasses import replace

import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.make import make_engine
from metrale_jax.llm_config import engine_config
from metrale_jax.speculative.draft_model import DraftModel, draft_model
from tests.conftest import GOLDENS
from tests.sometimes import mostly_slow
from tests.speculative.drafting import assert_drafts_are_its_own
from tests.speculative.solo_problems import assert_solo, prompts

DRAFTS = 3
# Target and drafter: of one layout, of others, and a target that keeps recurrent state.
PAIRS = {
    "dense": ("llama-default", "mistral-window"),
    "scaled": ("mistral-window", "gemma2"),
    "hybrid": ("nemotron-h", "gpt-oss"),
}


def pair(golden, name):
    target, draft = (golden(one, 8) for one in PAIRS[name])
    vocab = target.config.vocab_size
    config, params = draft.config, draft.params
    assert config.vocab_size == vocab
    return target, draft_model(target.config, config), params


@pytest.mark.parametrize("name", mostly_slow(PAIRS, always=["dense"]))
def test_drafts_are_what_the_draft_model_says_by_itself(golden, nan_pool, name):
    target, proposer, weights = pair(golden, name)
    assert_drafts_are_its_own(target, proposer, weights, prompts(target), DRAFTS, nan_pool)


@pytest.mark.parametrize("name", mostly_slow(PAIRS, always=[]))
def test_answers_are_those_without_drafts(golden, nan_pool, name):
    target, proposer, weights = pair(golden, name)
    steps, proposed, accepted = assert_solo(target, proposer, weights, fill=nan_pool)
    assert steps and proposed > accepted


@pytest.mark.parametrize("name", mostly_slow(["llama-default", "phi3-longrope"], always=["llama-default"]))
def test_a_model_that_drafts_for_itself_is_never_wrong(golden, nan_pool, name):
    model = golden(name, 8)
    names = "greedy", "sampled", "min_tokens"
    steps, proposed, accepted = assert_solo(model, DraftModel(model.config), model.params, names=names, fill=nan_pool)
    assert steps and proposed == accepted


def test_a_window_keeps_what_the_token_before_the_last_one_sees(nan_pool):
    path, limits = GOLDENS / "mistral-window", {"max_sequences": 1, "max_context_tokens": 128, "block_size": 4}
    drafts = {"proposer": "model", "drafter": path, "num_drafts": 2, "draft_mode": "always"}
    llm = LLM(path, kv_cache_mib=1, prefill_tokens=32, **limits, **drafts)
    steps = llm.loaded.steps
    llm.engine = make_engine(steps, llm.loaded.params, engine_config(llm.config, steps.model), nan_pool)
    llm.generate([[*range(5, 34)]], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    drafts = llm.stats().drafts
    assert drafts.proposed == drafts.accepted > 40


def test_a_model_that_cannot_draft_for_the_target_is_refused(golden):
    config = golden("llama-default", 8).config
    with pytest.raises(ConfigError, match="mistral draft model of vocab_size=67 .* llama model of vocab_size=131"):
        draft_model(config, replace(golden("mistral-window", 8).config, vocab_size=67))
