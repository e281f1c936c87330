# SPDX-License-Identifier: Apache-2.0
"""The async client against a scripted server."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from serving.client import (
    AsyncClient,
    CallCancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tests.serving.client.server import WAIT_S, fault

UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def run(target, clock):
    """Runs a coroutine function with a client of the server."""

    def run(work, **options):
        async def whole():
            async with AsyncClient(target, clock=clock, **options) as client:
                async with asyncio.timeout(WAIT_S):
                    return await work(client)

        return asyncio.run(whole())

    return run


@asynccontextmanager
async def waiting(client):
    """A stream whose first piece has come and whose second one does not."""
    async with client.stream("wait for me") as stream:
        assert await anext(stream) == "wait "
        yield stream


async def gone(servicer):
    assert await asyncio.to_thread(servicer.gone.acquire, timeout=WAIT_S)


def test_all_methods_answer(run, servicer):
    async def work(client):
        whole = await client.generate("one two", n=2, max_tokens=1)
        assert [one.text for one in whole.choices] == ["one ", "one "]
        async with client.stream("one two") as stream:
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.result.text == "one two " and stream.request_id == "made-up"
        forked = await client.fork("one", [{"continuation": "two"}, {}])
        assert [one.text for one in forked] == ["one two ", "one "]
        assert [piece.index async for piece in client.stream_fork("one", [{}, {}])] == [0, 1, 0, 1]
        assert (await client.score("one", ["two"]))[0].total_logprob == -1.0
        assert (await client.embed(["a"]))[0].num_tokens == 3
        assert (await client.tokenize([{"role": "user", "content": "one two"}])).token_ids == (0, 1)
        assert await client.detokenize([7]) == "7"
        assert (await client.models())[0].id == "scripted"
        assert await client.health() == "SERVING"
        with pytest.raises(NotFoundError):
            await client.health("nobody")

    run(work)


def test_many_streams_share_a_client(run):
    async def one(client, number):
        return "".join([piece async for piece in client.stream(f"stream {number}")])

    async def work(client):
        return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert run(work) == [f"stream {number} " for number in range(32)]


def test_calls_come_again_as_the_policy_says(run, servicer, time):
    async def work(client):
        servicer.faults = [fault(UNAVAILABLE), fault(EXHAUSTED, retry_after_s=2)]
        assert (await client.generate("one")).text == "one "
        servicer.faults = [fault(UNAVAILABLE)]
        assert [piece async for piece in client.stream("one")] == ["one ", ""]
        servicer.faults, servicer.num_before = [fault(UNAVAILABLE)], 1
        stream = client.stream("one two")
        assert await anext(stream) == "one "
        with pytest.raises(UnavailableError):
            await anext(stream)
        servicer.faults = [fault(grpc.StatusCode.INVALID_ARGUMENT, field="prompt")]
        with pytest.raises(InvalidRequestError) as raised:
            await client.generate("one")
        assert raised.value.field == "prompt"

    run(work)
    assert time.waits == pytest.approx([0.1, 2, 0.1])


def test_a_deadline_ends_calls_and_streams(run):
    async def work(client):
        with pytest.raises(DeadlineError):
            await client.generate("wait", timeout_s=0.1)
        with pytest.raises(DeadlineError):
            [piece async for piece in client.stream("wait for me", timeout_s=0.1)]

    run(work)


def test_closing_a_stream_cancels_its_call(run, servicer):
    async def work(client):
        async with waiting(client) as stream:
            pass
        assert [piece async for piece in stream] == [] and stream.result is None
        await gone(servicer)

    run(work)


def test_forgetting_a_stream_cancels_its_call(run, servicer):
    async def work(client):
        stream = client.stream("wait for me")
        assert await anext(stream) == "wait "
        del stream
        await gone(servicer)

    run(work)


def test_closing_a_stream_ends_who_reads_it(run, servicer):
    async def work(client):
        async with waiting(client) as stream:
            reader = asyncio.create_task(anext(stream, "ended"))
            await asyncio.sleep(0)
            stream.close()
            assert await reader == "ended"
        await gone(servicer)

    run(work)


def test_a_cancelled_task_stays_cancelled_and_cancels_its_call(run, servicer):
    async def work(client):
        async with waiting(client) as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
            await gone(servicer)
        task = asyncio.create_task(client.generate("wait"))
        while servicer.methods() != ["Generate", "GenerateUnary"]:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(servicer)

    run(work)


def test_closing_the_client_ends_what_runs_and_refuses_calls(run, servicer):
    async def work(client):
        async with waiting(client) as stream:
            reader = asyncio.create_task(anext(stream))
            whole = asyncio.create_task(client.generate("wait"))
            while "GenerateUnary" not in servicer.methods():
                await asyncio.sleep(0.005)
            await client.close()
            for task in (reader, whole):
                with pytest.raises(CallCancelledError):
                    await task
        for refused in (client.generate("one"), client.models()):
            with pytest.raises(CallCancelledError, match="client is closed"):
                await refused
        with pytest.raises(CallCancelledError, match="client is closed"):
            client.session()

    run(work)


def test_a_token_goes_with_every_call(run, servicer):
    async def work(client):
        await client.generate("one")
        [piece async for piece in client.stream("one")]
        async with client.session() as session:
            await session.generate("one")

    run(work, token="secret")
    calls = [metadata for method, _, metadata, _ in servicer.calls if method.startswith("Generate")]
    assert [metadata["authorization"] for metadata in calls] == ["Bearer secret"] * 3
