# SPDX-License-Identifier: Apache-2.0
"""What must be true of HTTP after something went wrong: whose fault it was is told, everybody else gets the tokens that
they have alone, and nothing is held."""

import asyncio
import json
import logging
import signal
import socket
import threading

import httpx
import pytest

from benchmarks.load.fronts.http_client import Connection, Cut, HttpError, request
from metrale_jax import LLM, SamplingParams
from serving.client import AsyncClient, RetryPolicy
from serving.core.lifecycle import State
from serving.core.service import ServiceSettings
from tests.serving.chaos import (
    GREEDY,
    LOUD,
    PROMPTS,
    QUIET,
    SIZES,
    GatedDevice,
    failing,
    mortal,
    revived,
    solo_answers,
    sticking,
    two_tenants,
)
from tests.serving.http.fronts import error_of
from tests.serving.test_serve_command import started
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

PATH = "/v1/completions"
LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
STATUSES = {200, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503}
HANGS_S = 240
# So many steps at most run a prompt of up to 180 tokens, or those of three that are shorter.
PROMPT_STEPS = 8


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


@pytest.fixture
def gated(model, monkeypatch):
    device = GatedDevice(model.engine.device)
    monkeypatch.setattr(model.engine, "device", device)
    return device


def run(scene):
    """What the scene gives; it hangs no longer than `HANGS_S`."""

    async def bounded():
        async with asyncio.timeout(HANGS_S):
            return await scene

    return asyncio.run(bounded())


async def until(holds):
    while not holds():
        await asyncio.sleep(0.002)


class Asking:
    """One request on a connection of its own."""

    def __init__(self, target, prompt, params, stream, token=None):
        self.target, self.stream = target, stream
        body = {"prompt": prompt, **params, "stream": stream, "return_token_ids": True}
        self.raw = request(target, PATH, body, {} if token is None else {"authorization": f"Bearer {token}"})
        self.connection = self.events = None

    async def begin(self):
        """Sends it."""
        self.connection = await Connection.open(self.target)
        self.connection.send(self.raw)
        self.events = self.connection.events()
        return self

    async def some(self):
        """The ids of the next event."""
        return (await anext(self.events))["choices"][0].get("token_ids", [])

    async def rest(self):
        """The ids of all that follows."""
        try:
            if self.stream:
                return [token async for event in self.events for token in event["choices"][0].get("token_ids", [])]
            return (await self.connection.answer())["choices"][0]["token_ids"]
        except HttpError as error:
            assert error.status in STATUSES and "Traceback" not in str(error) and ".py" not in str(error)
            raise
        finally:
            self.connection.close()


def target_of(server):
    return server.url.removeprefix("http://")


async def answered(target, prompt, params=GREEDY, stream=True, token=None):
    return tuple(await (await Asking(target, prompt, params, stream, token).begin()).rest())


async def all_answers(server, token=None):
    """Those to `PROMPTS`, or what was raised; every second is streamed."""
    works = [
        answered(target_of(server), prompt, GREEDY, bool(place % 2), token) for place, prompt in enumerate(PROMPTS)
    ]
    return await asyncio.gather(*works, return_exceptions=True)


async def state_of(server):
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{server.url}/health")
        return answer.status_code, answer.json()["state"]


def test_a_step_that_the_device_cannot_run_fails_who_is_in_it_and_nobody_after(model, expected, monkeypatch, no_logs):
    device = model.engine.device
    monkeypatch.setattr(device, "advance", failing(1, RuntimeError("device fault"), after=3)(device.advance))

    async def scene():
        async with whole_server(model) as server:
            first, second = await all_answers(server), await all_answers(server)
            await server.quiet()
            assert await state_of(server) == (200, "serving")
            return first, second

    first, second = run(scene())
    failed = [answer for answer in first if isinstance(answer, Exception)]
    assert failed and all(error.code == "internal_error" and error.status in (200, 500) for error in failed)
    pairs = zip(PROMPTS, first, strict=True)
    assert all(answer == expected[prompt] for prompt, answer in pairs if answer not in failed)
    assert second == list(expected.values())


def test_a_step_that_raises_in_the_host_is_run_again_for_everybody_at_both_fronts(
    model, expected, monkeypatch, no_logs
):
    monkeypatch.setattr(model.engine, "_step", failing(1, KeyError("host fault"), after=4)(model.engine._step))

    async def scene():
        once = RetryPolicy(max_attempts=1)
        async with whole_server(model) as server, AsyncClient(server.target, retries=once) as client:
            others = [asyncio.create_task(client.generate(prompt, **GREEDY)) for prompt in PROMPTS]
            answers = await all_answers(server)
            found = [(await other).token_ids for other in others]
            await server.quiet()
            return answers, found

    assert run(scene()) == (list(expected.values()),) * 2


def test_a_dead_engine_thread_fails_what_is_in_flight_and_says_so(model, monkeypatch, no_logs):
    dying = threading.Event()
    monkeypatch.setattr(model, "step", mortal(model.step, dying))

    async def scene():
        async with whole_server(model) as server:
            asking = await Asking(target_of(server), PROMPTS[0], LONG, stream=True).begin()
            whole = await Asking(target_of(server), PROMPTS[1], LONG, stream=False).begin()
            await asking.some()
            await until(lambda: server.service.num_calls == 2)
            dying.set()
            for one, status in ((asking, 200), (whole, 503)):
                with pytest.raises(HttpError, match="engine") as told:
                    await one.rest()
                assert (told.value.code, told.value.status) == ("service_unavailable", status)
            assert server.lifecycle.state is State.FAILED and await state_of(server) == (503, "failed")
            with pytest.raises(HttpError) as told:
                await answered(target_of(server), PROMPTS[0])
            assert told.value.status == 503

    run(scene())
    revived(model)


def test_a_stuck_step_is_noticed_and_told(model, monkeypatch, no_logs):
    stuck, release = threading.Event(), threading.Event()
    monkeypatch.setattr(model, "step", sticking(model.step, stuck, release))
    settings = ServiceSettings("tiny", warm_up=False, stuck_after_s=1.0)

    async def scene():
        async with whole_server(model, settings=settings) as server:
            asking = await Asking(target_of(server), PROMPTS[0], LONG, stream=True).begin()
            await asking.some()
            stuck.set()
            with pytest.raises(HttpError, match="more than the 1 s allowed") as told:
                await asking.rest()
            assert told.value.code == "service_unavailable" and await state_of(server) == (503, "failed")
            release.set()

    run(scene())
    revived(model)


def test_one_tenant_that_fills_the_pool_holds_no_other_up(model, expected, tmp_path):
    done = []

    async def scene():
        async with whole_server(model, two_tenants(tmp_path)) as server:

            async def flood(n):
                ids = await answered(target_of(server), f"{n} " * 10, LONG | {"max_tokens": 60}, bool(n % 2), LOUD)
                done.append("loud")
                return ids

            flooding = [asyncio.create_task(flood(n)) for n in range(40)]
            await until(lambda: model.engine.running)
            answers = await all_answers(server, QUIET)
            done.append("quiet")
            assert [len(ids) for ids in await asyncio.gather(*flooding)] == [60] * 40
            await server.quiet()
            assert [record.outcome for record in server.records] == ["ok"] * 46
            return answers

    assert run(scene()) == list(expected.values())
    assert done.index("quiet") <= 20, "the other tenant had to wait for the flood"


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("when, stream", [("before a byte", False), ("before a byte", True), ("amid", True)])
def test_who_vanishes_is_gone_from_the_engine_within_a_step(when, stream, way, model, expected, gated):
    async def scene():
        async with whole_server(model) as server:
            # Of this prompt a step runs a part only.
            gated.close(after=0 if when == "before a byte" else PROMPT_STEPS + 4)
            asking = await Asking(target_of(server), "word " * 36, LONG | {"max_tokens": 60}, stream).begin()
            if when == "amid":
                await asking.some()
            await until(lambda: gated.is_held)
            num_begun = gated.num_begun
            getattr(asking.connection, way)()
            # That it went is heard of although the engine is at a step.
            await until(lambda: not server.service.num_calls)
            gated.open()
            await server.quiet()
            assert gated.num_begun - num_begun <= 1
            assert [record.outcome for record in server.records] == ["cancelled"]
            return await all_answers(server)

    assert run(scene()) == list(expected.values())


def test_a_crowd_that_vanishes_leaves_nothing_behind(model, expected):
    async def scene():
        async with whole_server(model) as server:
            for way in ("close", "reset", "close"):
                leaving = [await Asking(target_of(server), prompt, LONG, stream=True).begin() for prompt in PROMPTS]
                await asyncio.gather(*[one.some() for one in leaving[:2]])
                for one in leaving:
                    getattr(one.connection, way)()
            answers = await all_answers(server)
            await server.quiet()
            assert {record.outcome for record in server.records} == {"cancelled", "ok"}
            return answers

    assert run(scene()) == list(expected.values())


def test_who_does_not_read_holds_nobody_up_and_is_answered_whole(model, expected):
    # In bytes more than what stands between them holds, in however few pieces.
    params = LONG | {"n": 4, "logprobs": 20}
    alone = model.generate([PROMPTS[0]], SamplingParams(**LONG))[0].token_ids

    async def scene():
        async with whole_server(model) as server:
            slow = [await _begin_narrow(Asking(target_of(server), PROMPTS[0], params, stream=True)) for _ in range(3)]
            await until(lambda: server.service.num_calls == len(slow))
            for one in server.http._connections._open:
                one.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            answers = await all_answers(server)
            # The engine is done with them: what they wait for is text.
            await until(lambda: not model.engine.has_work)
            assert server.service.num_calls == len(slow)
            for one in slow:
                ids, largest = await _read_by_index(one)
                assert ids == {index: list(alone) for index in range(4)}
                # What nobody took became one piece.
                assert largest > 20
            await server.quiet()
            return answers

    assert run(scene()) == list(expected.values())


async def _begin_narrow(asking):
    """It, begun on a connection that holds little."""
    narrow = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = asking.target.split(":")
    narrow.connect((host, int(port)))
    asking.connection = Connection(*await asyncio.open_connection(sock=narrow, limit=4096))
    asking.connection.send(asking.raw)
    asking.events = asking.connection.events()
    return asking


async def _read_by_index(asking):
    """The ids of each answer, and how many the largest piece had."""
    ids, largest = {}, 0
    async for event in asking.events:
        [choice] = event["choices"]
        piece = choice.get("token_ids", [])
        ids.setdefault(choice["index"], []).extend(piece)
        largest = max(largest, len(piece))
    asking.connection.close()
    return ids, largest


def test_calls_that_are_refused_leave_one_record_each(model):
    wrong = [
        ({"temperature": -1.0}, 400, "temperature", "invalid"),
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, 400, "allowed_token_ids", "invalid"),
        ({"n": 1000}, 400, "n", "invalid"),
        ({"prompt": "x" * 3000}, 400, "prompt", "too_long"),
        ({"regex": "("}, 400, "regex", "invalid"),
        ({"nonsense": 1}, 400, "nonsense", "invalid"),
        ({"model": "other"}, 404, "model", "not_found"),
    ]

    async def scene():
        async with whole_server(model) as server:
            for more, status, param, _ in wrong:
                for stream in (False, True):
                    with pytest.raises(HttpError) as told:
                        await answered(target_of(server), "x", {"max_tokens": 1} | more, stream)
                    assert (told.value.status, told.value.param) == (status, param)
            async with httpx.AsyncClient(base_url=server.url) as client:
                error_of(await client.get("/nothing"), 404)
                error_of(await client.get(PATH), 405)
                error_of(await client.post(PATH, content=b"{"), 415)
                long = error_of(await client.post(PATH, json={"prompt": [5] * 3000}), 400)
                assert long["code"] == "context_length_exceeded"
            await answered(target_of(server), "x", {"max_tokens": 1})
            await server.quiet()
            return [record.outcome for record in server.records]

    told = [outcome for *_, outcome in wrong for _ in range(2)]
    assert run(scene()) == [*told, "not_found", "invalid", "invalid", "too_long", "ok"]


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_drain_ends_streams_with_their_last_word_or_with_what_happened(grace_s, model, expected, gated):
    async def scene():
        async with whole_server(model) as server:
            gated.close(after=PROMPT_STEPS + 4)
            asking = [await Asking(target_of(server), prompt, GREEDY, stream=True).begin() for prompt in PROMPTS[:3]]
            begun = await asyncio.gather(*(one.some() for one in asking))
            await until(lambda: gated.is_held)
            ends = [asyncio.create_task(one.rest()) for one in asking]
            draining = asyncio.gather(server.service.drain(grace_s), server.http.drain(grace_s + 2.0))
            await until(lambda: server.lifecycle.state is State.DRAINING)
            # Where no call is left nobody listens any more.
            with pytest.raises(HttpError if grace_s else (HttpError, Cut)) as late:
                await answered(target_of(server), PROMPTS[0])
            if grace_s:
                assert late.value.code == "service_unavailable"
                gated.open()
            answers = await asyncio.gather(*ends, return_exceptions=True)
            gated.open()
            await draining
            await server.quiet()
            return begun, answers

    begun, answers = run(scene())
    if grace_s:
        whole = [(*some, *rest) for some, rest in zip(begun, answers, strict=True)]
        assert whole == [expected[prompt] for prompt in PROMPTS[:3]]
    else:
        assert all("shutting down" in str(error) and error.code == "service_unavailable" for error in answers)


def test_on_sigterm_streams_end_whole_and_the_command_exits_0(directory, model):
    alone = {prompt: model.generate([prompt], SamplingParams(**LONG))[0].token_ids for prompt in PROMPTS[:3]}
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", size)]
    ports = ("--grpc-port", 0, "--http-port", 0)

    async def scene(server, lines, target):
        asking = {prompt: await Asking(target, prompt, LONG, stream=True).begin() for prompt in alone}
        begun = dict(zip(alone, await asyncio.gather(*(one.some() for one in asking.values())), strict=True))
        server.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*(one.rest() for one in asking.values()))
        assert {prompt: (*begun[prompt], *ids) for prompt, ids in zip(alone, ends, strict=True)} == alone
        with pytest.raises((HttpError, Cut)):
            await answered(target, PROMPTS[0])

    with started(directory, *sizes, *ports, "--no-keep-programs", "--no-warm-up") as server:
        lines = (json.loads(line) for line in server.stderr)
        target = next(line for line in lines if line["event"] == "listening")["http"]
        next(line for line in lines if line.get("state") == "serving")
        run(scene(server, lines, target))
        rest = list(lines)
        assert server.wait(60) == 0
    assert [line["outcome"] for line in rest if line["event"] == "call"] == ["ok"] * 3
    assert (rest[-1]["event"], rest[-1]["status"]) == ("stopped", 0)
