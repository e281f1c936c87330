# SPDX-License-Identifier: Apache-2.0
"""Features mixed in one batch: each request's answer is the one that it gets alone, where its neighbours' options, the
cache and the batch do not exist."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from metrale_jax.generate import first_state
from metrale_jax.models.decoder import make_model
from metrale_jax.sampling.constraints import mask_of
from metrale_jax.sampling.params import SamplingParams, seed_bits
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import make_pool
from metrale_jax.steps.build import Steps
from tests.engine.conftest import LONG, Counting, Kit

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12)
# The second, whose programs take a while to compile, lets blocks go behind its windows.
MODELS = ["llama-default", pytest.param("gemma2", marks=pytest.mark.slow)]
HOT = SamplingParams(temperature=1.5, max_tokens=12)
# A draw, and a rule on top that changes what it gives.
RULES = [
    (GREEDY, {"repetition_penalty": 1.5}),
    (SAMPLED, {"presence_penalty": 0.8, "frequency_penalty": 0.5}),
    (GREEDY, {"logit_bias": {17: 3.5, 40: 3.0, 9: -100}}),
    (SAMPLED, {"allowed_token_ids": list(range(20, 80))}),
    (SAMPLED, {"banned_token_ids": list(range(3, 60))}),
    (HOT, {"min_p": 0.3}),
    (HOT, {"top_n_sigma": 0.6}),
    (HOT, {"typical_p": 0.3}),
    (HOT, {"top_k": 2}),
]


def prompt_of(kit, length, seed=0):
    return np.random.default_rng(seed).integers(3, kit.golden.config.vocab_size, length).tolist()


def strangers(kit, params=(GREEDY, SAMPLED), lengths=(9, 33, 5, 20)):
    for index, length in enumerate(lengths):
        yield kit.job(prompt_of(kit, length, 50 + index), params[index % len(params)], seed=300 + index)


def each_of(job):
    """The jobs of one answer each that a job of `n` answers stands for."""
    params = replace(job.params, n=1)
    return [replace(job, params=params, seed=seed_bits(job.seed, sample)) for sample in range(job.params.n)]


def never_again(answer):
    """Bad words that an answer holds: each pair of its tokens."""
    return [list(pair) for pair in itertools.pairwise(answer)]


def assert_solo(kit, jobs, requests):
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == kit.solo(job), f"prompt of {len(job.prompt)} tokens: {request.error}"


# Several answers to a prompt.


@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("name", MODELS)
def test_four_answers_are_four_requests_and_run_the_prompt_once(kit, name, chunk):
    kit = kit(name, config=LONG)
    job = kit.job(prompt_of(kit, 53), replace(SAMPLED, n=4), seed=21)
    engine = kit.engine(chunk)
    engine.device = Counting(engine.device)
    requests = kit.submit_all(engine, job)
    kit.finish(engine)
    assert engine.device.prompt_tokens == len(job.prompt)
    assert_solo(kit, each_of(job), requests)
    assert len({tuple(request.output) for request in requests}) == 4, "each has noise of its own"
    assert [request.cached_tokens for request in requests] == [0] * 4


@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("name", MODELS)
def test_four_answers_in_company_and_thrown_out_are_four_requests(kit, name, chunk):
    kit = kit(name, config=LONG)
    job = kit.job(prompt_of(kit, 53), replace(SAMPLED, n=4, priority=1, repetition_penalty=1.2), seed=22)
    others = list(strangers(kit, (replace(GREEDY, max_tokens=24), replace(SAMPLED, max_tokens=24))))
    engine = kit.engine(chunk, 24)
    neighbours = [kit.submit(engine, other) for other in others]
    requests = kit.submit_all(engine, job)
    kit.finish(engine)
    assert_solo(kit, [*each_of(job), *others], [*requests, *neighbours])
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("after", range(9))
def test_cancelling_the_first_of_several_answers_leaves_the_others_right(kit, after):
    kit = kit("llama-default", config=LONG)
    job = kit.job(prompt_of(kit, 53), replace(SAMPLED, n=3), seed=23)
    others = list(strangers(kit))[:2]
    engine = kit.engine(16)
    neighbours = [kit.submit(engine, other) for other in others]
    leader, *followers = kit.submit_all(engine, job)
    for _ in range(after):
        engine.step()
    engine.cancel(leader)
    kit.finish(engine)
    first, *rest = each_of(job)
    assert leader.output == kit.solo(first)[: len(leader.output)]
    assert_solo(kit, [*rest, *others], [*followers, *neighbours])


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_cancelling_a_later_answer_gives_its_place_back(kit, after):
    kit = kit("llama-default", config=LONG)
    job = kit.job(prompt_of(kit, 53), replace(SAMPLED, n=3), seed=23)
    engine = kit.engine(16)
    requests = kit.submit_all(engine, job)
    for _ in range(after):
        engine.step()
    engine.cancel(requests[1])
    kit.finish(engine)
    jobs = each_of(job)
    assert_solo(kit, [jobs[0], jobs[2]], [requests[0], requests[2]])


# Rules.


@pytest.mark.parametrize(("chunk", "usable_blocks"), [(16, None), (128, None), (16, 20), (128, 20)])
def test_rules_of_one_request_are_no_rules_of_another(kit, chunk, usable_blocks):
    kit = kit("llama-default", config=LONG)
    free = kit.solo(kit.job(prompt_of(kit, 30)))
    rules = [*RULES, (GREEDY, {"bad_words": never_again(free)})]
    jobs = []
    for index, (draw, rule) in enumerate(rules):
        plain = kit.job(prompt_of(kit, 21 + index), draw, seed=index)
        jobs.append(replace(plain, params=replace(draw, **rule)))
        assert kit.solo(jobs[-1]) != kit.solo(plain), f"{rule} changes the answer"
    jobs += strangers(kit)
    engine = kit.engine(chunk, usable_blocks)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert (sum(request.num_preemptions for request in requests) > 0) == (usable_blocks is not None)


class Turns:
    """A constraint: even and odd tokens take turns."""

    def __init__(self, vocab_size, parity=0):
        self._masks = [mask_of(range(start, vocab_size, 2), vocab_size) for start in (0, 1)]
        self._vocab_size, self._parity = vocab_size, parity

    def mask(self):
        return self._masks[self._parity]

    def accept(self, token):
        assert token % 2 == self._parity, "the mask was kept to"
        self._parity = 1 - self._parity

    def fork(self):
        return Turns(self._vocab_size, self._parity)


@pytest.mark.parametrize(("chunk", "usable_blocks"), [(16, None), (128, None), (16, 17)])
def test_an_answer_with_a_structure_runs_beside_answers_that_are_drawn_ahead(kit, chunk, usable_blocks):
    kit = kit("llama-default", config=LONG)
    turns = Turns(kit.golden.config.vocab_size)
    structured = [kit.job(prompt_of(kit, length), SAMPLED, seed=4) for length in (19, 37)]
    words = never_again(kit.alone(structured[1], turns.fork()))
    structured.append(replace(structured[1], params=replace(SAMPLED, bad_words=words)))
    several = kit.job(prompt_of(kit, 25), replace(SAMPLED, n=2), seed=6)
    others = list(strangers(kit))
    engine = kit.engine(chunk, usable_blocks)
    neighbours = [kit.submit(engine, job) for job in others]
    requests = [kit.submit(engine, job, turns) for job in structured] + kit.submit_all(engine, several, turns)
    kit.finish(engine)
    assert_solo(kit, others, neighbours)
    for job, request in zip([*structured, *each_of(several)], requests, strict=True):
        assert request.output == kit.alone(job, turns.fork()), request.error
        assert [token % 2 for token in request.output] == [0, 1] * 6
    assert usable_blocks is None or engine.stats().num_preemptions > 0


def test_stop_ids_of_one_request_end_no_other(kit):
    kit = kit("llama-default", config=LONG)
    prompt = prompt_of(kit, 30, 3)
    free = kit.solo(kit.job(prompt, SAMPLED))
    first, second, third = [at for at in range(12) if free[at] not in free[:at]][1:4]
    one, other = (replace(SAMPLED, stop_token_ids=[free[at]]) for at in (first, second))
    jobs = [kit.job(prompt, params) for params in (SAMPLED, one, other, replace(one, repetition_penalty=1.3))]
    jobs.append(kit.job(prompt, SAMPLED, eos_token_ids=(free[third],)))
    engine = kit.engine(16)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    ends = [(12, "length"), *((at + 1, "stop") for at in (first, second, third))]
    assert [(len(requests[index].output), requests[index].finish_reason) for index in (0, 1, 2, 4)] == ends


# Log-probabilities.


def log_probabilities(kit, tokens):
    """`[T, V]`: those of the token after each of `tokens`, from the model's logits for all of them at once."""
    steps, layout = kit.golden.steps, kit.golden.layout
    sizes = kit.shapes().advance(0, len(tokens), 1)
    state = first_state(layout, len(tokens), kit.shapes().table_width, GREEDY, 0, (), kit.golden.config.vocab_size)
    pool = make_pool(layout, (kit.num_blocks,) * len(layout.groups), kit.fill)
    chunk = np.pad(np.asarray(tokens, np.int32), (0, sizes.chunk_tokens - len(tokens)))
    _, _, logits = steps.run("score", kit.params, pool, state, chunk, np.asarray([len(tokens)], np.int32))
    logits = np.asarray(logits, np.float64)[: len(tokens)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_log_probabilities(entries, tokens, expected, count):
    assert [entry.token_id for entry in entries] == list(tokens)
    for entry, token, row in zip(entries, tokens, expected, strict=True):
        ids = [top for top, _ in entry.top]
        assert len(ids) == count
        np.testing.assert_allclose(entry.logprob, row[token], atol=1e-4)
        np.testing.assert_allclose([value for _, value in entry.top], row[ids], atol=1e-4)
        np.testing.assert_allclose(row[ids], np.sort(row)[::-1][:count], atol=1e-4)


@pytest.mark.parametrize(("chunk", "usable_blocks"), [(16, None), (128, None), (16, 30)])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_models_whatever_is_cached_or_cut(kit, name, chunk, usable_blocks):
    kit = kit(name, config=LONG)
    prompt = prompt_of(kit, 53)
    plain = replace(SAMPLED, repetition_penalty=1.3, logprobs=3)
    both = replace(plain, prompt_logprobs=2, priority=1)
    engine = kit.engine(chunk, usable_blocks)
    cold = kit.submit(engine, kit.job(prompt, plain, seed=8))
    while engine.step():
        pass
    others = list(strangers(kit, (replace(GREEDY, max_tokens=24), replace(SAMPLED, max_tokens=24))))
    neighbours = [kit.submit(engine, job) for job in others]
    warm = [kit.submit(engine, kit.job(prompt, params, seed=8)) for params in (plain, both)]
    if usable_blocks is not None:
        while not warm[1].prompt_logprobs:
            engine.step()
        assert not warm[1].finished, "it is thrown out half way"
        engine._preempt_newest()
    kit.finish(engine)
    assert_solo(kit, others, neighbours)
    answer = kit.solo(kit.job(prompt, replace(plain, logprobs=None), seed=8))
    expected = log_probabilities(kit, [*prompt, *answer])
    for request in (cold, *warm):
        assert request.output == answer, request.error
        assert_log_probabilities(request.logprobs, answer, expected[len(prompt) - 1 : -1], 3)
    assert [request.cached_tokens for request in (cold, *warm)] == [0, 48, 0], "a prompt that is scored is run whole"
    assert not warm[0].prompt_logprobs
    assert_log_probabilities(warm[1].prompt_logprobs, prompt[1:], expected[: len(prompt) - 1], 2)
    assert usable_blocks is None or warm[1].num_preemptions > 0


# Deadlines and priorities.


class Clock:
    """Time that passes when it is told to, or by one at every look."""

    def __init__(self, tick=0.0):
        self.now, self._tick = 100.0, tick

    def __call__(self):
        self.now += self._tick
        return self.now


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_a_deadline_ends_its_request_with_what_it_has_and_no_other(kit, steps):
    kit = kit("llama-default", config=LONG)
    clock = Clock()
    engine = kit.engine(16)
    engine.clock = clock
    late = kit.job(prompt_of(kit, 30), replace(SAMPLED, deadline_s=5.0, n=2), seed=31)
    others = [*strangers(kit), kit.job(prompt_of(kit, 12), replace(GREEDY, deadline_s=50.0))]
    ending = kit.submit_all(engine, late)
    requests = [kit.submit(engine, job) for job in others]
    for _ in range(steps):
        engine.step()
    clock.now += 5.0
    kit.finish(engine)
    assert_solo(kit, others, requests)
    for job, request in zip(each_of(late), ending, strict=True):
        assert request.finish_reason == "abort" and request.output == kit.solo(job)[: len(request.output)]
        assert "deadline of 5.0 s passed after" in str(request.error)
    assert any(request.output for request in ending) == (steps == 6)


def test_lower_priorities_are_served_first_and_equal_ones_in_order(kit):
    kit = kit("llama-default", config=LONG)
    engine = kit.engine(16)
    engine.clock = Clock(tick=1.0)
    jobs = [
        kit.job(prompt_of(kit, 16, index), replace(GREEDY, priority=priority))
        for index, priority in enumerate((0, 0, 2, -1, 1, -1))
    ]
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert sorted(range(6), key=lambda index: requests[index].started_at) == [3, 5, 0, 1, 4, 2]


# What is cached, and for whom.


def served(kit, engine, job):
    """The request for `job`, once it and nothing else has run."""
    request = kit.submit(engine, job)
    while engine.step():
        pass
    engine.check()
    assert request.output == kit.solo(job), request.error
    return request


def test_requests_share_what_is_cached_only_under_the_same_salt(kit):
    kit = kit("llama-default", config=LONG)
    engine = kit.engine()
    prompt = prompt_of(kit, 53)
    salted = [kit.job(prompt, replace(GREEDY, cache_salt=salt)) for salt in ("", "one", "two")]
    assert [served(kit, engine, job).cached_tokens for job in salted] == [0, 0, 0]
    assert [served(kit, engine, job).cached_tokens for job in salted] == [48, 48, 48]


def test_a_prompt_that_is_thrown_out_half_way_counts_nothing_as_cached(kit):
    kit = kit("llama-default", config=LONG)
    # The two short ones grow until the long one, of which one chunk is run in a step, has to give way.
    jobs = [kit.job(prompt_of(kit, 6, seed), replace(GREEDY, max_tokens=24)) for seed in (1, 2)]
    jobs.append(kit.job(prompt_of(kit, 101)))
    engine = kit.engine(16, 16)
    requests = [kit.submit(engine, job) for job in jobs]
    while not requests[2].num_preemptions:
        engine.step()
    assert not requests[2].output
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert requests[2].cached_tokens == 0 and engine.stats().prompt_tokens == 113


@pytest.mark.parametrize("chunk", [16, 64])
def test_what_is_cached_under_short_rotary_frequencies_serves_no_long_prompt(kit, chunk):
    kit = kit("phi3-longrope")
    engine = kit.engine(chunk)
    short = kit.job(prompt_of(kit, 27))
    answer = kit.solo(short)
    text = [*short.prompt, *answer, *prompt_of(kit, 9, 1)]
    # (tokens of the conversation, tokens of it that were cached): 32 is the last short length. The first answer grew
    # past it, so that four of its blocks stand under the long frequencies too.
    turns = [(27, 0), (27, 24), (31, 24), (32, 24), (33, 32), (45, 32), (45, 40), (30, 24)]
    for length, cached in turns:
        request = served(kit, engine, kit.job(text[:length]))
        assert request.cached_tokens == cached, f"{length} tokens"
    jobs = [kit.job([*text[:length], 7, 8], SAMPLED, seed=length) for length in (26, 30, 31, 40)]
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
    assert [request.cached_tokens for request in requests] == [24, 24, 24, 40]


@pytest.fixture(scope="module")
def dynamic(golden):
    """A kit whose frequencies follow the length above 64 tokens, where the checkpoint lets its context end."""
    stored = golden("llama-dynamic", LONG.block_size)
    config = replace(stored.config, max_context_tokens=LONG.max_context_tokens)
    steps = Steps(make_model(config, "cpu", LONG.block_size, StateFormats("float32", "float32")))
    return Kit(SimpleNamespace(params=stored.params, config=config, steps=steps, layout=stored.layout), True, LONG)


@pytest.mark.parametrize("usable_blocks", [None, 17])
def test_frequencies_that_follow_the_length_share_only_between_equal_lengths(dynamic, usable_blocks):
    kit = dynamic
    engine = kit.engine(16, usable_blocks)
    first = kit.job(prompt_of(kit, 60))
    text = [*first.prompt, *kit.solo(first), *prompt_of(kit, 9, 1)]
    # Up to 64 tokens all frequencies are the same.
    turns = [(60, 0), (60, 56), (63, 56), (72, 0), (72, 64), (73, 0), (80, 0), (64, 56)]
    for length, cached in turns:
        request = served(kit, engine, kit.job(text[:length]))
        assert usable_blocks or request.cached_tokens == cached, f"{length} tokens"
    jobs = [kit.job(text[:length], SAMPLED, seed=length) for length in (58, 62, 72)]
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    assert_solo(kit, jobs, requests)
