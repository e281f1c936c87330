# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers: an answer is a function of its request, wherever its state comes from.

Snapshots present, evicted, left by a stranger, on the host or on disk; preempted and run again or put back; forked;
with strangers beside it: the tokens are those of the same request alone on an engine with nothing optional.
"""

from dataclasses import replace

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from tests.conftest import GOLDENS

# One golden checkpoint for each kind of recurrent layer.
MODELS = ("qwen3-next-dense",)
OPTIONS = {"max_sequences": 4, "max_context_tokens": 256, "kv_cache_mib": 2, "prefill_tokens": 64}
SHARED, TAILS = 90, (5, 17, 33, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=1.1)


class Kit:
    """Engines over one golden model, and what requests come to alone."""

    def __init__(self, name):
        self.name = name
        self._plain = self.engine(prefix_cache=False)
        vocab = self._plain.loaded.config.vocab_size
        rng = np.random.default_rng(5)
        shared = rng.integers(3, vocab, SHARED).tolist()
        self.prompts = [shared + rng.integers(3, vocab, count).tolist() for count in TAILS]
        self.strangers = [rng.integers(3, vocab, 70).tolist() for _ in range(12)]
        self._solo = {}

    def engine(self, **options):
        return LLM(GOLDENS / self.name, **OPTIONS | options)

    def solo(self, prompt, params):
        key = tuple(prompt), params
        if key not in self._solo:
            self._solo[key] = self._plain.generate([prompt], params)[0].token_ids
        return self._solo[key]

    def holds(self, llm, prompts, params):
        """The results, all of which are solo answers."""
        results = llm.generate(prompts, params)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == self.solo(prompt, params), f"{len(prompt)} tokens, {result.usage}"
        return results


@pytest.fixture(scope="module", params=MODELS)
def kit(request):
    return Kit(request.param)


@pytest.fixture(scope="module")
def llm(kit):
    return kit.engine()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_snapshots_present_and_left_by_strangers(kit, llm, params):
    first, second, third, last = (kit.holds(llm, [prompt], params)[0] for prompt in kit.prompts)
    if params is GREEDY:
        assert first.usage.cached_tokens == 0
    assert min(one.usage.cached_tokens for one in (second, third, last)) >= 80
    again = kit.holds(llm, kit.prompts, params)
    assert min(result.usage.cached_tokens for result in again) >= 80


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0}, {"seed": 4}, {"n": 3, "seed": 9}, {"seed": 2, "repetition_penalty": 1.3, "min_tokens": 3}],
    ids=["greedy", "sampled", "several", "ruled"],
)
def test_of_a_prompt_that_comes_again_nothing_is_run_and_the_answer_is_the_same_to_the_bit(kit, llm, changes):
    params = SamplingParams(**{"logprobs": 3, "max_tokens": 10, "ignore_eos": True, **changes})
    for prompt in (kit.strangers[8][: 37 + len(changes)], kit.strangers[9][:48], [kit.strangers[10][len(changes)]]):
        llm.engine.memory.tree.clear()
        cold, *warm = (llm.generate([prompt], params)[0] for _ in range(3))
        assert [one.usage.cached_tokens for one in (cold, *warm)] == [0, len(prompt), len(prompt)]
        for one in warm:
            for mine, first in zip(one.choices, cold.choices, strict=True):
                assert (mine.token_ids, mine.logprobs) == (first.token_ids, first.logprobs)
        plain = kit._plain.generate([prompt], params)[0]
        assert [one.token_ids for one in cold.choices] == [one.token_ids for one in plain.choices]
    scored = llm.generate([prompt], replace(params, prompt_logprobs=2))[0]
    assert scored.usage.cached_tokens == 0 and scored.token_ids == cold.token_ids


def test_strangers_beside_it(kit, llm):
    kit.holds(llm, kit.prompts + kit.strangers[:4], GREEDY)


def test_a_prompt_in_chunks_of_any_size(kit):
    for prefill_tokens in (16, 24):
        kit.holds(kit.engine(prefill_tokens=prefill_tokens), kit.prompts, GREEDY)


def test_snapshots_evicted(kit):
    llm = kit.engine(snapshot_mib=0)
    results = kit.holds(llm, kit.prompts * 2, GREEDY)
    assert not any(result.usage.cached_tokens for result in results), "without a state no prefix is of use"


@pytest.mark.parametrize("where", ["host", "disk"])
def test_snapshots_that_were_evicted_and_come_back(where, kit, tmp_path):
    llm = kit.engine(**({"host_cache_mib": 64} if where == "host" else {"disk_cache": tmp_path}))
    kit.holds(llm, kit.prompts[:1], GREEDY)
    llm.spill()
    llm.engine.memory.tree.clear()
    [result] = kit.holds(llm, kit.prompts[:1], GREEDY)
    assert result.usage.cached_tokens == 80 and llm.engine.memory.spill.tier.stats.hits == 1
    if where == "disk":
        other = kit.engine(disk_cache=tmp_path)
        assert kit.holds(other, kit.prompts[:1], GREEDY)[0].usage.cached_tokens == 80


@pytest.mark.parametrize("swap_mib", [0, 16])
def test_preempted(kit, swap_mib):
    llm = kit.engine(swap_mib=swap_mib)
    memory = llm.engine.memory
    spare = [allocator.allocate(allocator.num_free - 16) for allocator in memory.allocators]
    kit.holds(llm, kit.prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for allocator, blocks in zip(memory.allocators, spare, strict=True):
        allocator.release(blocks)
    stats = llm.stats()
    assert stats.num_preemptions and stats.num_swaps == (stats.num_preemptions if swap_mib else 0)


def test_several_answers_and_beams(kit, llm):
    several = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=12, ignore_eos=True)
    beams = SamplingParams(beam_width=3, n=3, max_tokens=10)
    for params in (several, beams):
        for prompt in (kit.prompts[0], kit.strangers[0]):
            ours, plain = (one.generate([prompt], params)[0] for one in (llm, kit._plain))
            assert [one.token_ids for one in ours.choices] == [one.token_ids for one in plain.choices]


def test_the_next_turn_goes_on_from_what_decoding_left(kit, llm):
    asked = kit.strangers[5]
    answer = kit.holds(llm, [asked], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))[0]
    turn = [*asked, *answer.token_ids, 4, 5, 6]
    [result] = kit.holds(llm, [turn], GREEDY)
    assert result.usage.cached_tokens == 128, "of 139 tokens run, the last multiple of 64"


def test_a_saved_answer_goes_on(kit, llm, tmp_path):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True)
    answer = llm.submit(kit.prompts[1], params)
    while answer.num_generated < 9:
        llm.step()
    llm.save_answer(answer, tmp_path / "state")
    other = llm.load_answer(tmp_path / "state")
    while llm.step():
        pass
    assert other.result().token_ids == answer.result().token_ids == kit.solo(kit.prompts[1], params)
