# SPDX-License-Identifier: Apache-2.0
"""The service admits, prepares, hands out events and gives everything back, however a call ends."""

import asyncio
import logging
import threading
from contextlib import asynccontextmanager

import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import (
    BranchCall,
    Caller,
    CallInfo,
    DetokenizeCall,
    EmbedCall,
    ForkCall,
    GenerateCall,
    Prompt,
    ScoreCall,
    TokenizeCall,
)
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from serving.core.gate import Gate
from serving.core.keys import KeyLimits, KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.service import Parts, Service, ServiceSettings
from serving.core.tracing import Tracing
from tests.serving.core.fake_llm import FakeLLM

ANYBODY, NO_LIMITS = Caller(), KeyLimits()


class World:
    """A service over a fake model, and what it told."""

    def __init__(self, llm, limits=NO_LIMITS, gate=(0, 0), **settings):
        self.llm, self.records = llm, []
        self.lifecycle = Lifecycle()
        keys = KeyRing.anonymous(limits)
        loop = asyncio.get_running_loop()
        self.meter = Meter(keys.limits_of, loop.time)
        self.gate = Gate(*gate, loop.time)
        parts = Parts(keys, self.meter, self.gate, self.lifecycle, self.records.append, Tracing())
        self.service = Service(lambda wanted, progress: llm, ServiceSettings("fake", **settings), parts)

    def held(self):
        return self.meter.num_open, self.gate.num_waiting, self.service.num_calls


@asynccontextmanager
async def serving(llm=None, **options):
    world = World(llm or FakeLLM(), **options)
    serves = asyncio.Event()
    loop = asyncio.get_running_loop()
    world.lifecycle.listen(lambda state, _: state is State.SERVING and loop.call_soon_threadsafe(serves.set))
    world.service.start()
    try:
        await asyncio.wait_for(serves.wait(), 10)
        yield world
    finally:
        assert await world.service.stop(10)


def call(max_tokens=3, text="ab", n=1, **info):
    return GenerateCall(Prompt(text=text), SamplingParams(max_tokens=max_tokens, n=n), CallInfo(**info))


async def all_of(events):
    return [event async for event in events]


def scenario(function):
    """A test that is a coroutine."""

    def run(**fixtures):
        asyncio.run(asyncio.wait_for(function(**fixtures), 30))

    run.__name__ = function.__name__
    return run


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@scenario
async def test_a_call_gets_deltas_its_end_and_leaves_a_record():
    async with serving() as world:
        events = await all_of(world.service.generate(call(3, request_id="r", method="Generate"), Caller("k", peer="p")))
        assert "".join(event.text for event in events if isinstance(event, Delta)) == "abc"
        assert isinstance(events[-1], Ended) and events[-1].result.text == "abc"
        (record,) = world.records
        assert (record.method, record.request_id, record.key_id, record.peer) == ("Generate", "r", "k", "p")
        assert (record.model, record.outcome, record.finish_reasons) == ("fake", "ok", ("length",))
        assert (record.prompt_tokens, record.generated_tokens) == (2, 3) and record.prompt_text == ""
        assert 0 < record.admitted_s <= record.queued_s <= record.first_token_s <= record.finished_s
        assert world.held() == (0, 0, 0)


@scenario
async def test_what_chats_need_of_the_model_is_there_while_it_serves():
    async with serving() as world:
        model = world.service.chat_model()
        assert (model.template, dict(model.special_tokens), model.takes_tools) == ("", {}, False)
        await world.service.drain(0.0)
        with pytest.raises(ServiceError) as raised:
            world.service.chat_model()
        assert raised.value.kind is Kind.UNAVAILABLE


@scenario
async def test_timings_count_from_when_the_call_came():
    async with serving(FakeLLM(on_prepare=lambda: threading.Event().wait(0.1))) as world:
        (*_, end) = await all_of(world.service.generate(call(2), ANYBODY))
        assert end.result.metrics.finished_s >= 0.1 and end.result.metrics.first_token_s == 0.0


@scenario
async def test_forms_of_prompts_reach_the_engine_as_tokens():
    async with serving() as world:
        chat = Prompt(messages=({"role": "user", "content": "ab"},))
        for prompt in (Prompt(text="ab"), Prompt(token_ids=(97, 98)), chat):
            events = await all_of(world.service.generate(GenerateCall(prompt, SamplingParams(max_tokens=1)), ANYBODY))
            assert events[-1].result.prompt_token_ids == (97, 98)
        own = Prompt(messages=({"role": "user", "content": "a"},), template={"chat_template": "{{ 1 }}"})
        for prompt in (Prompt(), Prompt(text="a", token_ids=(1,)), own):
            with pytest.raises(ServiceError) as caught:
                await all_of(world.service.generate(GenerateCall(prompt, SamplingParams()), ANYBODY))
            assert caught.value.kind is Kind.INVALID and caught.value.field == "prompt"


@scenario
async def test_leaving_early_cancels_in_the_engine():
    async with serving() as world:
        events = world.service.generate(call(10_000), ANYBODY)
        await anext(events)
        await events.aclose()
        await until(lambda: world.llm.cancelled)
        assert world.held() == (0, 0, 0) and world.records[0].outcome == "cancelled"
        assert world.records[0].generated_tokens >= 1


@scenario
async def test_a_task_that_is_cancelled_gives_back_everything_even_while_it_prepares():
    gate = threading.Event()
    async with serving(FakeLLM(on_prepare=lambda: gate.wait(10))) as world:
        task = asyncio.ensure_future(all_of(world.service.generate(call(), ANYBODY)))
        await until(lambda: world.service.num_calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.held() == (0, 0, 0)
        gate.set()


@scenario
async def test_calls_that_wait_for_their_turn_are_counted():
    async with serving(FakeLLM()) as world:
        assert world.service.num_waiting == 0
        inside = 2 * world.llm.config.max_sequences
        tasks = [
            asyncio.ensure_future(all_of(world.service.generate(call(10_000), ANYBODY))) for _ in range(inside + 3)
        ]
        await until(lambda: world.service.num_waiting == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert world.service.num_waiting == 0 and world.held() == (0, 0, 0)


@scenario
async def test_a_deadline_ends_the_call_and_reaches_the_engine():
    stop = threading.Event()
    async with serving(FakeLLM(lambda: stop.wait(0.01) and None)) as world:
        with pytest.raises(ServiceError) as caught:
            await all_of(world.service.generate(call(10_000, timeout_s=0.1), ANYBODY))
        assert caught.value.kind is Kind.TOO_LATE
        await until(lambda: world.llm.cancelled)
        assert 0 < world.llm.cancelled[0].params.deadline_s <= 0.1
        assert world.records[0].outcome == "too_late" and world.held() == (0, 0, 0)


@scenario
async def test_what_the_server_allows_bounds_what_a_call_asks():
    async with serving(FakeLLM(lambda: threading.Event().wait(0.01)), max_timeout_s=0.05) as world:
        with pytest.raises(ServiceError, match="0.05 s"):
            await all_of(world.service.generate(call(10_000, timeout_s=100.0), ANYBODY))


@scenario
async def test_calls_that_name_no_timeout_get_the_servers():
    async with serving(FakeLLM(lambda: threading.Event().wait(0.01)), timeout_s=0.05, max_timeout_s=50.0) as world:
        with pytest.raises(ServiceError, match="0.05 s"):
            await all_of(world.service.generate(call(10_000), ANYBODY))


@scenario
async def test_a_call_for_another_model_is_not_found():
    async with serving() as world:
        with pytest.raises(ServiceError, match="'other'") as caught:
            await all_of(world.service.generate(call(model="other"), ANYBODY))
        assert caught.value.kind is Kind.NOT_FOUND and world.held() == (0, 0, 0)


@scenario
async def test_faults_of_params_name_their_field():
    def refuse():
        raise RequestError("top_p=2 is not ...; use less.", field="top_p")

    async with serving(FakeLLM(on_prepare=refuse)) as world:
        with pytest.raises(ServiceError) as caught:
            await all_of(world.service.generate(call(), ANYBODY))
        assert (caught.value.kind, caught.value.field) == (Kind.INVALID, "params.top_p")
        with pytest.raises(ServiceError) as caught:
            branches = (BranchCall(SamplingParams()),)
            await all_of(world.service.fork(ForkCall(Prompt(text="a"), branches), ANYBODY))
        assert caught.value.field == "branches[0].params.top_p"


@scenario
async def test_limits_of_a_key_refuse_and_recover():
    async with serving(limits=KeyLimits(max_concurrent=1)) as world:
        first = world.service.generate(call(10_000), ANYBODY)
        await anext(first)
        with pytest.raises(ServiceError) as caught:
            await all_of(world.service.generate(call(), ANYBODY))
        assert caught.value.kind is Kind.EXHAUSTED and caught.value.retry_after_s > 0
        await first.aclose()
        assert len(await all_of(world.service.generate(call(1), ANYBODY))) == 2
        assert [record.outcome for record in world.records] == ["exhausted", "cancelled", "ok"]


@scenario
async def test_a_full_queue_sheds():
    gate = threading.Event()
    async with serving(FakeLLM(on_prepare=lambda: gate.wait(10)), gate=(1, 0)) as world:
        first = asyncio.ensure_future(all_of(world.service.generate(call(1), ANYBODY)))
        await until(lambda: world.gate.num_waiting)
        with pytest.raises(ServiceError) as caught:
            await all_of(world.service.generate(call(1), ANYBODY))
        assert caught.value.kind is Kind.EXHAUSTED
        gate.set()
        await first
        assert world.held() == (0, 0, 0)


@scenario
async def test_branches_share_their_prompt():
    async with serving() as world:
        branches = (
            BranchCall(SamplingParams(max_tokens=1), Prompt(text="x")),
            BranchCall(SamplingParams(max_tokens=2)),
        )
        events = await all_of(world.service.fork(ForkCall(Prompt(text="abc"), branches), ANYBODY))
        ends = {event.index: event.result for event in events if isinstance(event, Ended)}
        assert {index: len(end.prompt_token_ids) for index, end in ends.items()} == {0: 4, 1: 3}
        assert world.llm.forks == [(2, 3)]


@scenario
async def test_scores_are_of_the_continuations_alone():
    async with serving() as world:
        ask = ScoreCall(Prompt(token_ids=(5, 6)), (Prompt(token_ids=(7,)), Prompt(token_ids=(8, 9))))
        one, two = await world.service.score(ask, ANYBODY)
        assert one.token_ids == (7,) and one.total_logprob == -7.0
        assert two.token_ids == (8, 9) and two.total_logprob == -17.0
        (whole,) = await world.service.score(ScoreCall(Prompt(token_ids=(5, 6, 7))), ANYBODY)
        assert whole.token_ids == (5, 6, 7) and whole.total_logprob == -13.0
        with pytest.raises(ServiceError) as caught:
            await world.service.score(ScoreCall(Prompt(text="a"), (Prompt(token_ids=()),)), ANYBODY)
        assert caught.value.field == "continuations[0]"


@scenario
async def test_vectors_and_tokens_come_back():
    async with serving() as world:
        found = await world.service.embed(EmbedCall((Prompt(text="abc"), Prompt(text="d"))), ANYBODY)
        assert [one.num_tokens for one in found] == [3, 1] and found[0].vector == (3.0, 0.5)
        assert list(await world.service.tokenize(TokenizeCall(Prompt(text="ab")), ANYBODY)) == [97, 98]
        assert await world.service.detokenize(DetokenizeCall((0, 1)), ANYBODY) == "ab"
        many = (Prompt(text="a"),) * 2048
        assert len(await world.service.embed(EmbedCall(many), ANYBODY)) == 2048
        for inputs in ((), (*many, many[0])):
            with pytest.raises(ServiceError) as caught:
                await world.service.embed(EmbedCall(inputs), ANYBODY)
            assert caught.value.field == "inputs"


@scenario
async def test_an_engine_that_died_fails_calls_under_way_and_those_that_come():
    logging.disable(logging.CRITICAL)
    broken = threading.Event()

    def step():
        if broken.is_set():
            raise SystemExit

    try:
        async with serving(FakeLLM(step)) as world:
            events = world.service.generate(call(10_000), ANYBODY)
            await anext(events)
            broken.set()
            with pytest.raises(ServiceError) as caught:
                await all_of(events)
            assert caught.value.kind is Kind.UNAVAILABLE
            assert world.lifecycle.state is State.FAILED
            with pytest.raises(ServiceError) as caught:
                await all_of(world.service.generate(call(), ANYBODY))
            assert caught.value.kind is Kind.UNAVAILABLE and world.held() == (0, 0, 0)
    finally:
        logging.disable(logging.NOTSET)


@scenario
async def test_a_stuck_step_is_noticed_while_the_loop_goes_on():
    release = threading.Event()
    stuck = threading.Event()

    def step():
        if stuck.is_set():
            release.wait(20)

    async with serving(FakeLLM(step), stuck_after_s=0.2) as world:
        events = world.service.generate(call(10_000), ANYBODY)
        await anext(events)
        stuck.set()
        with pytest.raises(ServiceError, match="step for"):
            await all_of(events)
        assert world.lifecycle.state is State.FAILED and "step" in world.lifecycle.reason
        release.set()


@scenario
async def test_draining_lets_calls_end_and_refuses_new_ones():
    async with serving() as world:
        events = world.service.generate(call(50), ANYBODY)
        await anext(events)
        drained = asyncio.ensure_future(world.service.drain(20))
        await until(lambda: world.lifecycle.state is State.DRAINING)
        with pytest.raises(ServiceError) as caught:
            await all_of(world.service.generate(call(), ANYBODY))
        assert caught.value.kind is Kind.UNAVAILABLE and caught.value.retry_after_s
        assert isinstance((await all_of(events))[-1], Ended)
        assert await drained == 0


@scenario
async def test_what_outlasts_the_grace_is_told_so():
    async with serving(FakeLLM(lambda: threading.Event().wait(0.01))) as world:
        reader = asyncio.ensure_future(all_of(world.service.generate(call(10_000), ANYBODY)))
        await until(lambda: world.llm.running)
        assert await world.service.drain(0.05) == 1
        with pytest.raises(ServiceError, match="shutting down"):
            await reader
        await until(lambda: world.llm.cancelled)


@scenario
async def test_a_slow_reader_holds_nobody_up_and_gets_all_in_one_piece():
    async with serving() as world:
        slow = world.service.generate(call(500), ANYBODY)
        first = await anext(slow)
        assert isinstance((await all_of(world.service.generate(call(20), ANYBODY)))[-1], Ended)
        await until(lambda: not world.service._hosting.current.busy)
        rest = await all_of(slow)
        assert len(rest) == 2 and len(first.token_ids) + len(rest[0].token_ids) == 500


@scenario
async def test_answers_that_nobody_reads_keep_no_place_and_no_turn():
    async with serving(gate=(3, 0)) as world:
        unread = [world.service.generate(call(10), ANYBODY) for _ in range(20)]
        for events in unread:
            await anext(events)
        await until(lambda: not world.llm.running)
        assert world.gate.num_waiting == 0
        assert isinstance((await all_of(world.service.generate(call(3), ANYBODY)))[-1], Ended)
        for events in unread:
            await events.aclose()
        assert {record.outcome for record in world.records} == {"ok", "cancelled"}
        assert all(record.generated_tokens == 10 for record in world.records if record.outcome == "cancelled")


@scenario
async def test_prompts_are_kept_in_records_only_where_asked_for():
    async with serving(keep_prompts=True) as world:
        await all_of(world.service.generate(call(1, text="secret"), ANYBODY))
        assert world.records[0].prompt_text == "secret"


@scenario
async def test_salts_of_callers_never_meet():
    async with serving() as world:
        running = []
        for caller, own in ((Caller(salt="a"), "b"), (Caller(salt="ab"), ""), (Caller(), "ab"), (Caller(), "1:ab")):
            ask = GenerateCall(Prompt(text="x"), SamplingParams(max_tokens=10_000, cache_salt=own))
            running.append(world.service.generate(ask, caller))
            await anext(running[-1])
        salts = {answer.params.cache_salt for answer in world.llm.running}
        assert len(salts) == 4
        for events in running:
            await events.aclose()


@scenario
async def test_a_call_in_the_background_takes_nothing_of_its_keys_limits_and_no_place_in_the_queue():
    async with serving(limits=KeyLimits(requests_per_minute=1, max_concurrent=1), gate=(1, 0)) as world:
        for _ in range(3):
            events = world.service.generate(call(background=True), Caller())
            assert not world.meter.num_open and not world.gate.num_waiting
            assert len(await all_of(events)) >= 2
        await all_of(world.service.generate(call(), Caller()))
        assert [record.outcome for record in world.records] == ["ok"] * 4
        with pytest.raises(ServiceError, match="limit of 1 requests"):
            await all_of(world.service.generate(call(), Caller()))
