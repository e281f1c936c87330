# SPDX-License-Identifier: Apache-2.0
"""One request gives one answer: whatever the batch, the chunks and the memory, the engine gives the solo tokens."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import Ask
from metrale_jax.engine.buckets import Advance
from metrale_jax.engine.warmup import all_programs, compile_programs
from metrale_jax.sampling.params import SamplingParams
from tests.engine.conftest import CONFIG

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12)
# Rows of the batch come and go: prompts of less than a block, of many chunks, and up to the switch of LongRoPE at 32.
LENGTHS = (27, 3, 45, 1, 16, 31, 8, 32, 20)
# All blocks for good, blocks that go behind a window, and frequencies that change on the way.
MODELS = ["llama-default", "gemma2", "phi3-longrope"]
MORE_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "llama-longrope", "mistral-window")]


def crowd(kit, params, lengths=LENGTHS):
    rng = np.random.default_rng(sum(lengths))
    return [
        kit.job(rng.integers(3, kit.golden.config.vocab_size, length), params, seed=1000 + index)
        for index, length in enumerate(lengths)
    ]


def assert_solo(kit, jobs, requests):
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == kit.solo(job), f"request of {len(job.prompt)} tokens: {request.error}"
        assert not request.in_flight and request.lease is None


@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_solo_answers_are_the_stored_ones(kit, name):
    kit = kit(name)
    for length in (1, 7, 33):
        job = kit.job(kit.golden.prompt[:length], SamplingParams(temperature=0, max_tokens=20))
        assert kit.solo(job) == kit.golden.data[f"greedy_{length}"].tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_every_request_gives_its_solo_answer(kit, name, params):
    kit = kit(name)
    jobs = crowd(kit, params)
    preempted = {}
    for prefill_tokens, usable_blocks, count in itertools.product((16, 64), (None, 11), (1, len(jobs))):
        engine = kit.engine(prefill_tokens, usable_blocks)
        requests = [kit.submit(engine, job) for job in jobs[:count]]
        kit.finish(engine)
        assert_solo(kit, jobs[:count], requests)
        assert {request.finish_reason for request in requests} == {"length"}
        preempted[usable_blocks, count] = sum(request.num_preemptions for request in requests)
    assert preempted[11, len(jobs)] > 0, "so few blocks that requests were thrown out"
    assert preempted[None, len(jobs)] == 0
    assert preempted[11, 1] == 0


@pytest.mark.parametrize("length", [29, 30, 31, 32, 33])
def test_a_request_that_grows_past_the_length_of_its_rope_is_computed_again(kit, length):
    kit = kit("phi3-longrope")
    jobs = crowd(kit, GREEDY, (length, 5))
    for usable_blocks in (None, 9):
        engine = kit.engine(16, usable_blocks)
        requests = [kit.submit(engine, job) for job in jobs]
        kit.finish(engine)
        assert_solo(kit, jobs, requests)
        assert not usable_blocks or requests[0].num_preemptions == 0, "a change of frequencies is no preemption"


def test_the_newest_gives_way_even_with_half_a_prompt_filled(kit):
    kit = kit("llama-default")
    # One step takes two whole prompts and the start of a third, and no block is left for the decode after next.
    jobs = crowd(kit, GREEDY, (7, 7)) + crowd(kit, SamplingParams(temperature=0, max_tokens=8), (55,))
    engine = kit.engine(16, 9)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine, most_steps=200)
    assert [request.num_preemptions > 0 for request in requests] == [False, False, True]
    assert_solo(kit, jobs, requests)


def test_requests_that_arrive_while_others_run_give_their_solo_answers(kit):
    kit = kit("llama-default")
    jobs = crowd(kit, SAMPLED)
    engine = kit.engine(16)
    requests = []
    for index, job in enumerate(jobs):
        requests.append(kit.submit(engine, job))
        for _ in range(index % 4):
            engine.step()
    kit.finish(engine)
    assert_solo(kit, jobs, requests)


@pytest.mark.parametrize("usable_blocks", [None, 11])
def test_decoding_and_prefill_apart_and_prompts_cut_to_sizes_give_the_solo_answers(kit, usable_blocks):
    kit = kit("llama-default")
    jobs = crowd(kit, SAMPLED)
    engine = kit.engine(64, usable_blocks, mixed_steps=False, step_tokens=2)
    engine.device = Watched(engine.device)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert not any(sizes.decode_rows and sizes.chunk_tokens for sizes in engine.device.seen)


def test_a_stop_id_ends_the_answer_and_is_its_last_token(kit):
    kit = kit("llama-default")
    free = kit.solo(kit.job(kit.golden.prompt[:7]))
    stop = free[5]
    first = free.index(stop)
    by_eos = kit.job(kit.golden.prompt[:7], eos_token_ids=(stop,))
    by_id = kit.job(kit.golden.prompt[:7], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))
    engine = kit.engine()
    requests = [kit.submit(engine, job) for job in (by_eos, by_id)]
    kit.finish(engine)
    for request in requests:
        assert request.output == free[: first + 1]
        assert request.finish_reason == "stop"
    assert_solo(kit, (by_eos, by_id), requests)


def test_ignoring_eos_runs_on_and_leaves_own_stop_ids_in_force(kit):
    kit = kit("llama-default")
    free = kit.solo(kit.job(kit.golden.prompt[:7]))
    ignoring = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    job = kit.job(kit.golden.prompt[:7], ignoring, eos_token_ids=(free[2],))
    both = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[free[4]])
    engine = kit.engine()
    request = kit.submit(engine, job)
    stopped = kit.submit(engine, kit.job(kit.golden.prompt[:7], both, eos_token_ids=(free[2],)))
    kit.finish(engine)
    assert request.output == free and request.finish_reason == "length"
    assert stopped.output == free[: free.index(free[4]) + 1] and stopped.finish_reason == "stop"


def test_no_stop_id_is_drawn_before_min_tokens(kit):
    kit = kit("llama-default")
    free = kit.solo(kit.job(kit.golden.prompt[:7]))
    at = next(index for index in range(3, 12) if free[index] not in free[:index])

    def job(min_tokens):
        params = SamplingParams(temperature=0, max_tokens=12, min_tokens=min_tokens)
        return kit.job(kit.golden.prompt[:7], params, eos_token_ids=(free[at],))

    jobs = [*crowd(kit, GREEDY, (14, 15)), job(at + 1), job(at)]
    engine = kit.engine(64, 7)
    requests = [kit.submit(engine, one) for one in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert requests[-1].num_preemptions > 0, "thrown out and run again"
    assert requests[-1].output == free[: at + 1], "the stop may be drawn as soon as min_tokens stand"
    assert requests[-2].output[:at] == free[:at]
    assert requests[-2].output[at] != free[at]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_an_answer_has_max_tokens_tokens(kit, max_tokens):
    kit = kit("llama-default")
    jobs = crowd(kit, SamplingParams(temperature=0, max_tokens=max_tokens))
    engine = kit.engine(16)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert all(len(request.output) == max_tokens for request in requests)


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_an_answer_may_fill_the_context_and_ends_there(kit, name):
    kit = kit(name)
    jobs = [
        kit.job(kit.golden.prompt[:63]),
        kit.job(kit.golden.prompt[:33], SamplingParams(temperature=0, max_tokens=None)),
    ]
    engine = kit.engine(16, 9)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert [len(request.output) for request in requests] == [1, 31]
    assert {request.finish_reason for request in requests} == {"length"}
    assert_solo(kit, jobs, requests)


def test_what_can_never_be_served_is_refused_with_its_numbers(kit):
    kit = kit("llama-default")
    engine = kit.engine(usable_blocks=5)
    with pytest.raises(RequestError, match="30 and answer of 12 tokens need 7 KV blocks, the cache has 5"):
        kit.submit(engine, kit.job(range(3, 33)))
    with pytest.raises(RequestError, match="prompt of 64 tokens leaves no room in a context of 64"):
        kit.submit(engine, kit.job(kit.golden.prompt[:64]))
    with pytest.raises(RequestError, match="prompt of 0 tokens"):
        kit.submit(engine, kit.job([]))
    with pytest.raises(RequestError, match="token id 131 is outside the vocabulary of 131"):
        kit.submit(engine, kit.job([131]))
    with pytest.raises(RequestError, match="stop_token_ids names the token id 131, which"):
        kit.submit(engine, kit.job([3], SamplingParams(stop_token_ids=[131])))
    with pytest.raises(RequestError, match="9 stop ids with min_tokens are above the limit of 8"):
        kit.submit(engine, kit.job([3], SamplingParams(stop_token_ids=list(range(9)), min_tokens=1)))
    assert not engine.step()
    job = kit.job(range(3, 22))
    request = kit.submit(engine, job)
    kit.finish(engine)
    assert_solo(kit, [job], [request])


def test_a_watch_ends_its_request_and_sees_each_token_once(kit):
    kit = kit("llama-default")
    free = kit.solo(kit.job(kit.golden.prompt[:7]))
    seen = []

    def watch(tokens):
        seen.extend(tokens)
        return len(seen) == 4

    engine = kit.engine()
    request = engine.submit(Ask(kit.golden.prompt[:7].tolist(), GREEDY, [0]), [watch])[0]
    kit.finish(engine)
    assert seen == request.output == free[:4]
    assert request.finish_reason == "stop"


def test_log_probabilities_are_given_with_each_token_and_change_none(kit):
    kit = kit("llama-default")
    job = kit.job(kit.golden.prompt[:7])
    engine = kit.engine()
    wanted = [SamplingParams(temperature=0, max_tokens=3, logprobs=count) for count in (2, 0)]
    asking = [kit.submit(engine, kit.job(job.prompt, params)) for params in wanted]
    others = crowd(kit, SAMPLED, (3, 16))
    requests = [kit.submit(engine, other) for other in others]
    kit.finish(engine)
    assert_solo(kit, others, requests)
    assert not requests[0].logprobs
    logits = kit.golden.data["logits_7"][-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-expected)[:2]
    first = asking[0].logprobs[0]
    assert [token for token, _ in first.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in first.top], expected[best], atol=1e-4)
    for request in asking:
        assert request.output == kit.solo(job)[:3]
        assert [entry.token_id for entry in request.logprobs] == request.output
    assert [entry.logprob for entry in asking[1].logprobs] == [entry.top[0][1] for entry in asking[0].logprobs]
    assert not any(entry.top for entry in asking[1].logprobs)


class Watched:
    """A device that notes the shape of each step that it runs."""

    def __init__(self, device):
        self._device, self.seen = device, set()

    def __getattr__(self, name):
        return getattr(self._device, name)

    def advance(self, decoding, chunks):
        tokens, rows = (0, 0) if chunks is None else (len(chunks.tokens), len(chunks.lengths))
        self.seen.add(Advance(0 if decoding is None else len(decoding.seq_lens), tokens, rows))
        return self._device.advance(decoding, chunks)


def test_after_warm_up_no_load_compiles_anything(kit):
    wide, kit = kit("llama-default"), kit("llama-default", False, replace(CONFIG, max_sequences=2, prefill_tokens=16))
    engine = kit.engine(16, 12)
    steps, wanted = kit.golden.steps, all_programs(engine.shapes, kit.golden.config.vocab_size)
    promised = compile_programs(steps, kit.params, kit.config, wanted)
    assert [program.result() for program in promised] == list(wanted)
    num_compiles = steps.num_compiles
    engine.device = Watched(engine.device)
    rng = np.random.default_rng(0)
    kinds = [
        GREEDY,
        SamplingParams(temperature=1.0, top_k=9, min_p=0.01, max_tokens=9, min_tokens=1),
        SamplingParams(temperature=1.0, n=2, max_tokens=5, logprobs=2),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, bad_words=[[5, 6]], prompt_logprobs=1),
    ]
    served = []
    for index in range(500):
        job = kit.job(rng.integers(3, 131, rng.integers(1, 50)), kinds[index % len(kinds)], index, (2,))
        served.append((job, kit.submit(engine, job)))
        for _ in range(rng.integers(0, 9)):
            engine.step()
    kit.finish(engine)
    assert steps.num_compiles == num_compiles
    assert engine.device.seen == {program for program in wanted if isinstance(program, Advance)}, (
        "each shape was needed, and no other"
    )
    greedy = [(job, request) for job, request in served if job.params is GREEDY]
    assert_solo(wide, *zip(*greedy, strict=True))
