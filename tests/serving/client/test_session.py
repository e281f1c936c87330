# SPDX-License-Identifier: Apache-2.0
"""Many requests over one call, against a scripted server."""

import asyncio

import grpc
import pytest

from serving.client import (
    AsyncClient,
    CallCancelledError,
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    ServerError,
)
from tests.serving.client.server import WAIT_S, fault


@pytest.fixture
def run(target, clock):
    """Runs a coroutine function with a session."""

    def run(work):
        async def whole():
            async with asyncio.timeout(WAIT_S), AsyncClient(target, clock=clock) as client, client.session() as session:
                return await work(session)

        return asyncio.run(whole())

    return run


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


def test_many_requests_share_one_call(run, servicer):
    async def work(session):
        texts = await asyncio.gather(*(session.generate(f"request {number}") for number in range(50)))
        assert [one.text for one in texts] == [f"request {number} " for number in range(50)]
        assert len({one.request_id for one in texts}) == 50

    run(work)
    assert servicer.methods().count("GenerateStream") == 1 and servicer.methods().count("generate") == 50


def test_requests_are_told_apart_by_their_ids(run):
    async def work(session):
        held = session.stream("wait for me", request_id="held")
        assert await anext(held) == "wait "
        stream = session.stream("one two", request_id="free")
        assert [piece async for piece in stream] == ["one ", "two ", ""]
        assert stream.request_id == "free" and stream.result.text == "one two "
        with pytest.raises(ValueError, match="'held' is of a request that runs"):
            session.stream("one", request_id="held")

    run(work)


def test_a_request_is_cancelled_and_the_others_go_on(run, servicer):
    async def work(session):
        held = session.stream("wait for me", request_id="held")
        assert await anext(held) == "wait "
        assert session.cancel("held") and not session.cancel("held") and not session.cancel("nobody")
        with pytest.raises(CallCancelledError, match="request was cancelled"):
            await anext(held)
        assert (await session.generate("one")).text == "one "
        async with session.stream("wait for me") as closed:
            assert await anext(closed) == "wait "
        assert [piece async for piece in closed] == []
        await until(lambda: servicer.methods().count("cancel") == 2)

    run(work)


def test_a_cancelled_task_cancels_its_request(run, servicer):
    async def work(session):
        task = asyncio.create_task(session.generate("wait for me", request_id="held"))
        await until(lambda: "generate" in servicer.methods())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "cancel" in servicer.methods())

    run(work)


def test_a_failed_request_leaves_the_others(run, servicer, time):
    async def work(session):
        servicer.faults = [fault(grpc.StatusCode.INVALID_ARGUMENT, "too hot")]
        with pytest.raises(InvalidRequestError, match="too hot") as raised:
            await session.generate("one")
        assert raised.value.field == "prompt"
        servicer.faults = [fault(grpc.StatusCode.RESOURCE_EXHAUSTED)] * 2
        assert (await session.generate("one")).text == "one "
        servicer.faults = [fault(grpc.StatusCode.RESOURCE_EXHAUSTED)] * 5
        with pytest.raises(ExhaustedError):
            await session.generate("one")

    run(work)
    assert time.waits == [0.25] * 6


def test_a_deadline_is_told_to_the_server_and_kept_here(run, servicer):
    async def work(session):
        with pytest.raises(DeadlineError):
            await session.generate("wait for me", timeout_s=0.1)
        await session.generate("one", timeout_s=50, deadline_s=20)
        await until(lambda: "cancel" in servicer.methods())

    run(work)
    first, second = (message.generate.params for method, message, *_ in servicer.calls if method == "generate")
    assert first.deadline_s == pytest.approx(0.1) and second.deadline_s == 20


def test_finishing_lets_what_runs_end(run):
    async def work(session):
        held = session.stream("wait for me")
        assert await anext(held) == "wait "
        await session.finish()
        assert [piece async for piece in held] == ["for ", "me ", ""]
        with pytest.raises(CallCancelledError):
            await session.generate("one")

    run(work)


def test_a_failed_call_fails_all_its_requests(run, servicer):
    async def work(session):
        held = session.stream("wait for me")
        assert await anext(held) == "wait "
        servicer.faults = [fault(grpc.StatusCode.INTERNAL, "broken")]
        for stream in (session.stream("one"), held):
            with pytest.raises(ServerError, match="broken"):
                await anext(stream)
        with pytest.raises(ServerError, match="broken"):
            session.stream("one")

    run(work)


def test_closing_the_session_ends_its_requests(run):
    async def work(session):
        held = session.stream("wait for me")
        assert await anext(held) == "wait "
        await session.close()
        with pytest.raises(CallCancelledError):
            await anext(held)
        await session.close()

    run(work)
