# SPDX-License-Identifier: Apache-2.0
"""GenerateStream: many requests on one call."""

import asyncio
from collections import defaultdict

import grpc

from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from serving.grpc.stubs import generate_pb2 as pb
from tests.serving.grpc.fronts import asked, fronted, refused, run, stalled, started, taken_back
from tests.serving.scripted import ScriptedService, answer, result

CANCELLED = grpc.StatusCode.CANCELLED.value[0]
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def collected(call) -> dict[str, list]:
    """What came, by request: texts of deltas, then "done" or the code of the failure."""
    found = defaultdict(list)
    while (response := await call.read()) is not grpc.aio.EOF:
        event = response.WhichOneof("event")
        told = {"delta": response.delta.text, "done": "done", "failed": response.failed.code}
        found[response.request_id].append(told[event])
    return found


def test_many_requests_are_answered_each_under_its_id():
    async def check():
        async with fronted(ScriptedService()) as world:
            call = world.stub.GenerateStream()
            for place in range(40):
                await call.write(started(f"text{place}", f"q{place}"))
            await call.done_writing()
            found = await collected(call)
            assert found == {f"q{place}": [*f"text{place}", "done"] for place in range(40)}
            assert await call.code() == grpc.StatusCode.OK
            assert sorted(world.service.ended) == sorted(found) and not world.service.cancelled

    run(check())


def test_closing_the_sending_half_lets_what_runs_end():
    async def check():
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(Delta(0, "a"), gate, *answer("b")))) as world:
            call = world.stub.GenerateStream()
            await call.write(started("x", "q"))
            assert (await call.read()).delta.text == "a"
            await call.done_writing()
            await asyncio.sleep(0.05)
            gate.set()
            assert await collected(call) == {"q": ["b", "done"]}

    run(check())


def test_a_failed_request_leaves_the_others_alone():
    async def check():
        service = ScriptedService()
        service.scripts = {
            "late": (Delta(0, "a"), ServiceError(Kind.EXHAUSTED, "Too many.", field="model", retry_after_s=2.5)),
            "odd": (RuntimeError("secret"),),
        }
        async with fronted(service) as world:
            call = world.stub.GenerateStream()
            for request_id in ("late", "odd", "fine"):
                await call.write(started("x", request_id))
            await call.write(started("", "empty"))
            await call.write(started("x", "bad", top_k=-7))
            await call.done_writing()
            failures = {}
            async for response in call:
                if response.WhichOneof("event") == "failed":
                    failures[response.request_id] = response.failed
            assert await call.code() == grpc.StatusCode.OK
            assert set(failures) == {"late", "odd", "empty", "bad"}
            late = failures["late"]
            assert (late.code, late.message, late.field, late.retry_after_s) == (8, "Too many.", "model", 2.5)
            assert failures["odd"].code == 13 and "secret" not in failures["odd"].message
            assert not failures["odd"].HasField("retry_after_s")
            assert (failures["empty"].code, failures["empty"].field) == (INVALID, "prompt")
            assert failures["bad"].code == INVALID
            assert service.ended.count("fine") == 1

    run(check())


def test_a_running_id_cannot_be_used_again_until_it_has_ended():
    async def check():
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(Delta(0, "a"), gate, *answer("b")))) as world:
            call = world.stub.GenerateStream()
            await call.write(started("x", "q"))
            assert (await call.read()).delta.text == "a"
            await call.write(started("y", "q"))
            failed = (await call.read()).failed
            assert (failed.code, failed.field) == (INVALID, "request_id")
            gate.set()
            while (await call.read()).WhichOneof("event") != "done":
                pass
            await call.write(started("y", "q"))
            await call.done_writing()
            assert await collected(call) == {"q": ["a", "b", "done"]}

    run(check())


def test_an_id_is_free_as_soon_as_its_answer_is_there():
    async def check():
        # The service still has something to do after the last event.
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(*answer("b"), gate))) as world:
            call = world.stub.GenerateStream()
            for _ in range(2):
                await call.write(started("x", "q"))
                assert (await call.read()).delta.text == "b"
                assert (await call.read()).WhichOneof("event") == "done"
            gate.set()
            await call.done_writing()
            assert await collected(call) == {}
            assert world.service.ended == ["q", "q"]

    run(check())


def test_one_request_can_be_taken_back():
    async def check():
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(Delta(0, "a"), gate, *answer("b")))) as world:
            call = world.stub.GenerateStream()
            for request_id in ("gone", "stays"):
                await call.write(started("x", request_id))
                assert (await call.read()).delta.text == "a"
            await call.write(taken_back("gone"))
            response = await call.read()
            assert (response.request_id, response.failed.code) == ("gone", CANCELLED)
            assert world.service.cancelled == ["gone"] and world.service.running == ["stays"]
            await call.write(taken_back("gone"))
            await call.write(taken_back("never"))
            gate.set()
            await call.done_writing()
            assert await collected(call) == {"stays": ["b", "done"]}

    run(check())


def test_a_request_taken_back_at_once_ends_with_its_failure():
    async def check():
        async with fronted(ScriptedService(script=(asyncio.Event(),))) as world:
            call = world.stub.GenerateStream()
            for place in range(20):
                await call.write(started("x", f"q{place}"))
                await call.write(taken_back(f"q{place}"))
            await call.done_writing()
            assert await collected(call) == {f"q{place}": [CANCELLED] for place in range(20)}
            assert not world.service.running

    run(check())


def test_a_request_is_taken_back_though_nobody_reads():
    async def check():
        service = ScriptedService(script=tuple(Delta(0, "x" * 100_000) for _ in range(100)))
        async with fronted(service) as world:
            call = world.stub.GenerateStream()
            await call.write(started("x", "q"))
            await stalled(service)
            assert service.num_pulled < 100, "all was sent, so nothing waits"
            await call.write(taken_back("q"))
            await service.until(lambda: service.cancelled == ["q"])
            assert (await collected(call_closed(call)))["q"][-1] == CANCELLED

    def call_closed(call):
        asyncio.get_running_loop().create_task(call.done_writing())
        return call

    run(check())


def test_a_client_that_goes_away_ends_all_its_requests():
    async def check():
        async with fronted(ScriptedService(script=(Delta(0, "a"), asyncio.Event()))) as world:
            call = world.stub.GenerateStream()
            for place in range(10):
                await call.write(started("x", f"q{place}"))
            await world.service.until(lambda: len(world.service.running) == 10)
            call.cancel()
            await world.service.until(lambda: len(world.service.cancelled) == 10)

    run(check())


def test_a_client_that_goes_away_after_its_last_request_ends_all_too():
    async def check():
        async with fronted(ScriptedService(script=(Delta(0, "a"), asyncio.Event()))) as world:
            call = world.stub.GenerateStream()
            await call.write(started("x", "q"))
            await call.done_writing()
            await world.service.until(lambda: world.service.num_pulled)
            await world.channel.close()
            await world.service.until(lambda: world.service.cancelled == ["q"])

    run(check())


def test_a_stream_runs_so_many_requests_and_no_more():
    async def check():
        gate = asyncio.Event()
        service = ScriptedService(script=(gate, *answer("b")))
        async with fronted(service, max_requests_per_stream=2) as world:
            call = world.stub.GenerateStream()
            for request_id in ("a", "b", "c"):
                await call.write(started("x", request_id))
            response = await call.read()
            assert (response.request_id, response.failed.code) == ("c", 8)
            gate.set()
            await call.done_writing()
            assert set(await collected(call)) == {"a", "b"}

    run(check())


def test_a_reader_that_is_slow_holds_each_request_back_by_itself():
    async def check():
        service = ScriptedService(script=tuple(Delta(0, "x" * 100_000) for _ in range(200)))
        async with fronted(service) as world:
            call = world.stub.GenerateStream()
            for place in range(3):
                await call.write(started("x", f"q{place}"))
            await service.until(lambda: len(service.running) == 3)
            await asyncio.sleep(0.3)
            # What fits into windows and sockets is some MiB; each request is one event ahead beside it.
            assert service.num_pulled < 100
            await call.done_writing()
            found = await collected(call)
            assert {request_id: len(texts) for request_id, texts in found.items()} == {
                f"q{place}": 200 for place in range(3)
            }

    run(check())


def test_an_action_that_is_none_fails_alone():
    async def check():
        async with fronted(ScriptedService()) as world:
            call = world.stub.GenerateStream()
            await call.write(pb.GenerateStreamRequest())
            await call.write(started("x", "q"))
            await call.done_writing()
            assert await collected(call) == {"": [INVALID], "q": ["x", "done"]}

    run(check())


def test_all_answers_of_a_request_come():
    async def check():
        script = (Delta(0, "a"), Ended(0, result("a")), Delta(1, "b"), Ended(1, result("b")))
        async with fronted(ScriptedService(script=script)) as world:
            call = world.stub.GenerateStream()
            await call.write(started("x", "q", n=2))
            await call.done_writing()
            assert await collected(call) == {"q": ["a", "done", "b", "done"]}

    run(check())


def test_garbage_ends_the_stream_and_all_that_runs_on_it():
    async def check():
        async with fronted(ScriptedService(script=(Delta(0, "a"), asyncio.Event()))) as world:
            call = world.channel.stream_stream("/metrale.v1.GenerateService/GenerateStream")()
            await call.write(started("x", "q").SerializeToString())
            await world.service.until(lambda: world.service.num_pulled)
            await call.write(b"\xff\xff\xff")
            await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
            await world.service.until(lambda: world.service.cancelled == ["q"])

    run(check())


def test_a_draining_server_ends_its_streams_when_nothing_runs_on_them():
    async def check():
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(Delta(0, "a"), gate, *answer("b")))) as world:
            idle, busy = world.stub.GenerateStream(), world.stub.GenerateStream()
            await idle.initial_metadata()
            await busy.write(started("x", "q"))
            assert (await busy.read()).delta.text == "a"
            draining = asyncio.create_task(world.front.drain(10))
            await refused(idle, grpc.StatusCode.UNAVAILABLE)
            gate.set()
            assert (await busy.read()).delta.text == "b"
            assert (await busy.read()).WhichOneof("event") == "done"
            await refused(busy, grpc.StatusCode.UNAVAILABLE)
            await draining
            await refused(world.stub.GenerateUnary(asked()), grpc.StatusCode.UNAVAILABLE)

    run(check())
