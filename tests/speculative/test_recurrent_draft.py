# SPDX-License-Identifier: Apache-2.0
"""Draft models that keep recurrent state: what they draft against themselves alone, and answers they do not change.

A model that drafts for itself is never wrong only as long as its state is: every draft that is rejected, every step
without drafts and every copy of a slot would show.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.answers import params_for
from metrale_jax.engine.make import make_engine
from metrale_jax.engine.tiers import Tier
from metrale_jax.llm_config import engine_config
from metrale_jax.speculative.draft_model import DraftModel, draft_model
from metrale_jax.speculative.recurrent_draft import RecurrentDraftModel
from tests.conftest import GOLDENS
from tests.sometimes import mostly_slow
from tests.speculative.drafting import assert_drafts_are_its_own
from tests.speculative.solo_problems import assert_solo, prompts

DRAFTS = 3
# Target and drafter: dense, a mixture of experts and hybrids, by purely recurrent ones and hybrids; the last pair has
# equal layers, which lie in one group.
PAIRS = {
    "dense, recurrent": ("mistral-window", "mamba2"),
    "experts, hybrid": ("qwen3-moe", "nemotron-h"),
    "hybrid, recurrent": ("qwen3-next-dense", "mamba2"),
    "recurrent, hybrid": ("mamba2", "falcon-h1"),
    "hybrid, attending": ("nemotron-h", "mistral-window"),
    "hybrid, hybrid": ("qwen3-next-dense", "qwen3-next"),
}
# One for each kind of recurrent layer.
KINDS = ("mamba2", "qwen3-next-dense", "kimi-linear", "falcon-h1", "nemotron-h")
OPTIONS = {"max_sequences": 2, "max_context_tokens": 128, "kv_cache_mib": 2, "prefill_tokens": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def pair(golden, name):
    target, draft = (golden(one, 8) for one in PAIRS[name])
    vocab, params = target.config.vocab_size, draft.params
    config = replace(draft.config, vocab_size=vocab)

    def rows(weights):
        return jnp.concatenate([weights, -weights])[:vocab]

    head = params.head if isinstance(params.head, tuple) else rows(params.head)
    return target, draft_model(target.config, config), params.replace(embed=rows(params.embed), head=head)


@pytest.mark.parametrize("name", mostly_slow(PAIRS, always=["dense, recurrent"]))
def test_drafts_are_what_the_draft_model_says_by_itself(golden, nan_pool, name):
    target, proposer, weights = pair(golden, name)
    assert_drafts_are_its_own(target, proposer, weights, prompts(target), DRAFTS, nan_pool)


@pytest.mark.parametrize("name", mostly_slow(PAIRS, always=[]))
def test_answers_are_those_without_drafts(golden, nan_pool, name):
    target, proposer, weights = pair(golden, name)
    steps, proposed, accepted = assert_solo(target, proposer, weights, fill=nan_pool)
    assert steps and proposed > accepted


def assert_never_wrong(model, num_drafts, fill):
    # An answer that ended early would leave accepted drafts behind its end uncounted.
    options = {"names": ("greedy", "sampled"), "fill": fill, "stop_ids": ()}
    proposer = draft_model(model.config, model.config)
    steps, proposed, accepted = assert_solo(model, proposer, model.params, num_drafts, **options)
    assert steps and proposed == accepted


@pytest.mark.parametrize("name", mostly_slow(KINDS, always=["nemotron-h"]))
def test_a_model_that_drafts_for_itself_is_never_wrong(golden, nan_pool, name):
    model = golden(name, 8)
    assert_never_wrong(model, DRAFTS, nan_pool)


@pytest.mark.parametrize("num_drafts", mostly_slow([1, 8], always=[]))
def test_as_many_drafts_as_are_wished_for(golden, nan_pool, num_drafts):
    model = golden("nemotron-h", 8)
    assert_never_wrong(model, num_drafts, nan_pool)


def test_what_is_kept_by_slot_decides_how_a_draft_model_is_kept_in_step(golden):
    target = golden("qwen3-next-dense", 8).config
    assert isinstance(draft_model(target, golden("gpt-oss", 8).config), DraftModel)
    for name in ("mamba2", "bamba"):
        assert isinstance(draft_model(target, golden(name, 8).config), RecurrentDraftModel)


def engine(target, draft, **options):
    """An engine on golden models that always drafts."""
    drafts = {"proposer": "model", "drafter": GOLDENS / draft, "num_drafts": DRAFTS, "draft_mode": "always"}
    return LLM(GOLDENS / target, **OPTIONS | drafts | options)


def texts(*lengths):
    rng = np.random.default_rng(3)
    return [rng.integers(3, 67, length).tolist() for length in lengths]


class Engines:
    """One that drafts and one without anything optional, on the same target."""

    def __init__(self, target, draft):
        self.drafting, self.never_wrong = engine(target, draft), target == draft
        self._plain = LLM(GOLDENS / target, **OPTIONS, prefix_cache=False)

    def hold(self, asked, params, run=None):
        """Asserts that answers are those without drafts, and of a model that drafts for itself that no draft is
        rejected; gives the results."""
        each = zip(asked, params_for(params, len(asked)), strict=True)
        expected = [[one.token_ids for one in self._plain.generate([prompt], one)[0].choices] for prompt, one in each]
        before = self.drafting.stats().drafts
        results = (run or self.drafting.generate)(asked, params)
        self.drafting.engine.check()
        assert [[one.token_ids for one in result.choices] for result in results] == expected
        after = self.drafting.stats().drafts
        proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
        assert proposed and (accepted == proposed or not self.never_wrong)
        return results


# The smallest that has layers of either sort.
ENGINES = ["falcon-h1, itself"]


@pytest.fixture(scope="module", params=ENGINES)
def engines(request):
    target, draft = request.param.split(", ")
    return Engines(target, target if draft == "itself" else draft)


def test_in_company_and_from_the_cache_and_nothing_is_compiled_anew(engines):
    shared, *tails = texts(41, 5, 17, 12)
    asked = [[*shared, *tail] for tail in tails]
    engines.hold(asked, GREEDY)
    for _ in range(2):
        compiled = engines.drafting.stats().num_compiles
        results = engines.hold(asked, GREEDY)
        assert all(result.usage.cached_tokens >= 32 for result in results)
    assert engines.drafting.stats().num_compiles == compiled
    engines.hold(asked, replace(GREEDY, temperature=1.5, seed=4))


def test_the_next_turn_goes_on_from_the_state_that_an_answer_left(engines):
    [asked] = texts(41)
    [first] = engines.hold([asked], replace(GREEDY, max_tokens=40))
    [second] = engines.hold([[*asked, *first.token_ids, 7, 8]], GREEDY)
    assert second.usage.cached_tokens >= 64


def test_answers_to_one_prompt_draft_from_the_state_at_its_end(engines):
    engines.hold(texts(22), replace(GREEDY, temperature=1.0, seed=5, n=2))


def test_forks_draft_from_the_state_of_what_they_were_forked_from(engines):
    def forked(asked, params):
        llm = engines.drafting
        answers = llm.submit_forks([llm.prepare(prompt, params) for prompt in asked], 37)
        while llm.step():
            llm.engine.check()
        return [answer.result() for answer in answers]

    stem, *tails = texts(37, 1, 4)
    engines.hold([[*stem, *tail] for tail in tails], GREEDY, forked)


def test_answers_end_at_every_length_and_with_the_context(engines):
    short = [replace(GREEDY, max_tokens=count) for count in range(1, 11)]
    engines.hold(texts(*range(9, 19)), short)
    [whole] = engines.hold(texts(117), replace(GREEDY, max_tokens=None))
    assert len(whole.token_ids) == OPTIONS["max_context_tokens"] - 117


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["run again", "swapped"])
def test_who_has_made_room_for_others_drafts_on_from_its_state(engines, swap_bytes):
    def cramped(asked, params):
        memory = engines.drafting.engine.memory
        memory.forget()
        memory.swap.max_bytes = swap_bytes
        spare = [allocator.allocate(allocator.num_free - 7) for allocator in memory.allocators]
        results = engines.drafting.generate(asked, params)
        memory.swap.max_bytes = 0
        for allocator, blocks in zip(memory.allocators, spare, strict=True):
            allocator.release(blocks)
        return results

    before = engines.drafting.stats()
    results = engines.hold(texts(41, 30), replace(GREEDY, max_tokens=40), cramped)
    assert any(result.metrics.num_preemptions for result in results)
    assert (engines.drafting.stats().num_swaps > before.num_swaps) == bool(swap_bytes)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_an_answer_that_was_saved_drafts_on_from_its_state(engines, num_tokens, tmp_path):
    def put_aside(asked, params):
        llm = engines.drafting
        answer = llm.submit(*asked, params)
        while answer.num_generated < num_tokens:
            llm.step()
        llm.save_answer(answer, tmp_path / "state")
        llm.cancel([answer])
        llm.engine.memory.forget()
        again = llm.load_answer(tmp_path / "state")
        while llm.step():
            llm.engine.check()
        return [again.result()]

    engines.hold(texts(29), GREEDY, put_aside)


def test_a_prefix_that_left_the_pool_brings_its_state_back(engines, monkeypatch):
    llm = engines.drafting
    settings = engine_config(llm.config, llm.loaded.steps.model)
    tier = Tier(1 << 20)
    monkeypatch.setattr(llm, "engine", make_engine(llm.loaded.steps, llm.loaded.params, settings, tier=tier))
    asked = texts(49)
    engines.hold(asked, GREEDY)
    llm.spill()
    llm.engine.memory.forget(distrusted=False)
    [result] = engines.hold(asked, GREEDY)
    assert tier.stats.hits == 1 and result.usage.cached_tokens == 48
