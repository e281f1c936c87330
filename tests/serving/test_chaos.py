# SPDX-License-Identifier: Apache-2.0
"""What must be true after something went wrong: whose fault it was is told, everybody else gets their answer, and
nothing is held."""

import asyncio
import errno
import logging
import threading

import pytest

from metrale_jax import LLM
from serving.client import AsyncClient, InvalidRequestError, RetryPolicy, ServerError, UnavailableError
from serving.core.lifecycle import State
from serving.core.service import ServiceSettings
from tests.serving.chaos import (
    GREEDY,
    LOUD,
    PROMPTS,
    QUIET,
    SIZES,
    failing,
    mortal,
    revived,
    solo_answers,
    sticking,
    two_tenants,
)
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_chat(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(directory):
    return LLM(directory, **SIZES)


@pytest.fixture(scope="module")
def expected(model):
    return solo_answers(model)


@pytest.fixture
def no_logs(caplog):
    caplog.set_level(logging.CRITICAL)


def client_of(server, token=None):
    return AsyncClient(server.target, token=token, timeout_s=60, retries=ONCE)


async def all_answers(client, prompts=PROMPTS):
    return await asyncio.gather(*[client.generate(prompt, **GREEDY) for prompt in prompts], return_exceptions=True)


def right(answers, expected):
    return [answer.token_ids == expected[prompt] for prompt, answer in zip(PROMPTS, answers, strict=True)]


def test_a_step_that_the_device_cannot_run_fails_who_is_in_it_and_nobody_after(model, expected, monkeypatch, no_logs):
    device = model.engine.device
    monkeypatch.setattr(device, "advance", failing(1, RuntimeError("device fault"), after=3)(device.advance))

    async def scene():
        async with whole_server(model) as server, client_of(server) as client:
            first = await all_answers(client)
            second = await all_answers(client)
            await server.quiet()
            assert await client.health() == "SERVING"
            return first, second

    first, second = asyncio.run(scene())
    failed = [answer for answer in first if isinstance(answer, Exception)]
    assert failed and all(isinstance(error, ServerError) and error.code == "INTERNAL" for error in failed)
    served = [
        answer.token_ids == expected[prompt]
        for prompt, answer in zip(PROMPTS, first, strict=True)
        if answer not in failed
    ]
    assert all(served) and all(right(second, expected))


def test_a_step_that_raises_in_the_host_is_run_again_for_everybody(model, expected, monkeypatch, no_logs):
    monkeypatch.setattr(model.engine, "_step", failing(1, KeyError("host fault"), after=4)(model.engine._step))

    async def scene():
        async with whole_server(model) as server, client_of(server) as client:
            answers = await all_answers(client)
            await server.quiet()
            return answers

    assert all(right(asyncio.run(scene()), expected))


def test_a_dead_engine_thread_fails_what_is_in_flight_and_says_so(model, monkeypatch, no_logs):
    dying = threading.Event()
    monkeypatch.setattr(model, "step", mortal(model.step, dying))

    async def scene():
        async with whole_server(model) as server, client_of(server) as client:
            stream = client.stream(PROMPTS[0], temperature=0.0, max_tokens=200)
            await anext(stream)
            dying.set()
            with pytest.raises(UnavailableError, match="engine"):
                async for _ in stream:
                    pass
            assert server.lifecycle.state is State.FAILED and await client.health() == "NOT_SERVING"
            with pytest.raises(UnavailableError):
                await client.generate(PROMPTS[0])

    asyncio.run(scene())
    revived(model)


def test_a_stuck_step_is_noticed_and_told(model, monkeypatch, no_logs):
    stuck, release = threading.Event(), threading.Event()
    monkeypatch.setattr(model, "step", sticking(model.step, stuck, release))
    settings = ServiceSettings("tiny", warm_up=False, stuck_after_s=1.0)

    async def scene():
        async with whole_server(model, settings=settings) as server, client_of(server) as client:
            stream = client.stream(PROMPTS[0], temperature=0.0, max_tokens=200)
            await anext(stream)
            stuck.set()
            with pytest.raises(UnavailableError, match="more than the 1 s allowed"):
                async for _ in stream:
                    pass
            assert await client.health() == "NOT_SERVING"
            release.set()

    asyncio.run(scene())


def test_one_tenant_that_fills_the_pool_holds_no_other_up(model, expected, tmp_path):
    done = []

    async def scene():
        async with (
            whole_server(model, two_tenants(tmp_path)) as server,
            client_of(server, LOUD) as loud,
            client_of(server, QUIET) as quiet,
        ):

            async def flood(n):
                answer = await loud.generate(f"{n} " * 10, temperature=0.0, max_tokens=60, ignore_eos=True)
                done.append("loud")
                return answer

            flooding = [asyncio.ensure_future(flood(n)) for n in range(40)]
            while not model.engine.running:
                await asyncio.sleep(0.005)
            answers = await asyncio.gather(*[quiet.generate(prompt, **GREEDY) for prompt in PROMPTS])
            done.append("quiet")
            loud_ones = await asyncio.gather(*flooding)
            await server.quiet()
            assert all(answer.finish_reason == "length" for answer in loud_ones)
            return answers

    assert all(right(asyncio.run(scene()), expected))
    assert done.index("quiet") <= 20, "the other tenant had to wait for the flood"


def test_clients_that_vanish_leave_nothing_behind(model, expected):
    async def scene():
        async with whole_server(model) as server:
            for _ in range(3):
                leaving = client_of(server)
                streams = [
                    leaving.stream(prompt, temperature=0.0, max_tokens=200, ignore_eos=True) for prompt in PROMPTS
                ]
                await asyncio.gather(*[anext(stream) for stream in streams[:2]])
                await leaving.close()
            async with client_of(server) as client:
                answers = await all_answers(client)
            await server.quiet()
            assert {record.outcome for record in server.records} == {"cancelled", "ok"}
            return answers

    assert all(right(asyncio.run(scene()), expected))


def test_a_long_prompt_is_run_a_step_at_a_time_and_ends_with_its_caller(directory, expected):
    """However long the prompt, the host is a step ahead of the device at most: so a watchdog sees steps, and what was
    taken back is run no further."""
    long = LLM(directory, max_sequences=4, max_context_tokens=500, prefill_tokens=16, kv_cache_mib=1)
    ahead, most = [0], []
    advance, wait, fetch = long.engine.device.advance, long.engine.device.wait, long.engine.device.fetch

    def counted(decoding, chunks):
        ahead[0] += 1
        most.append(ahead[0])
        return advance(decoding, chunks)

    def settled(inner):
        def call(given):
            ahead[0] = 1
            return inner(given)

        return call

    long.engine.device.advance, long.engine.device.wait = counted, settled(wait)
    long.engine.device.fetch = settled(fetch)

    async def scene():
        async with whole_server(long) as server, client_of(server) as client:
            leaving = asyncio.ensure_future(client.generate([65] * 480, temperature=0.0, max_tokens=2))
            while not most:
                await asyncio.sleep(0)
            leaving.cancel()
            answers = await all_answers(client)
            await server.quiet()
            return answers

    answers = asyncio.run(scene())
    assert max(most) <= 3 and len(most) > 10
    assert [len(answer.token_ids) for answer in answers] == [len(expected[prompt]) for prompt in PROMPTS]


def test_calls_that_are_refused_leave_one_record_each(model):
    async def scene():
        async with whole_server(model) as server, client_of(server) as client:
            for wrong in ({"temperature": -1.0}, {"allowed_token_ids": [5], "banned_token_ids": [5]}, {"n": 1000}):
                with pytest.raises(InvalidRequestError) as told:
                    await client.generate("x", **wrong)
                assert told.value.field.removeprefix("params.") in wrong
            async with client.session() as session:
                with pytest.raises(InvalidRequestError):
                    await session.generate("x", top_p=2.0)
            await client.generate("x", max_tokens=1)
            await server.quiet()
            return server.records

    records = asyncio.run(scene())
    assert [record.outcome for record in records] == ["invalid"] * 4 + ["ok"]
    assert [record.field for record in records[:2]] == ["params.temperature", "params.allowed_token_ids"]


def test_a_full_disk_below_the_prefix_cache_costs_no_answer(directory, expected, tmp_path, monkeypatch, no_logs):
    refused = []

    def full(path, *_):
        refused.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("metrale_jax.engine.disk.write_saved", full)
    small = LLM(directory, **SIZES, disk_cache=tmp_path / "cache", host_cache_mib=1)

    async def scene():
        async with whole_server(small) as server, client_of(server) as client:
            answers = await all_answers(client)
            small.spill()
            again = await all_answers(client)
            await server.quiet()
            return answers, again

    for answers in asyncio.run(scene()):
        assert all(right(answers, expected))
    assert refused


def test_a_server_that_starts_again_finds_what_it_knew_on_disk(directory, expected, tmp_path):
    async def scene():
        llm = LLM(directory, **SIZES, disk_cache=tmp_path / "cache")
        async with whole_server(llm) as server, client_of(server) as client:
            answers = await all_answers(client)
            await server.quiet()
            return answers

    cold, warm = asyncio.run(scene()), asyncio.run(scene())
    assert all(right(cold, expected)) and all(right(warm, expected))
    assert [answer.usage.cached_tokens for answer in cold] == [0] * len(PROMPTS)
    assert all(answer.usage.cached_tokens >= 16 for answer in warm)
