# SPDX-License-Identifier: Apache-2.0
"""Crowds of clients that hold what they can: bodies, connections, heads; and what stands between."""

import asyncio
import socket
import tracemalloc
from contextlib import asynccontextmanager

import pytest

from benchmarks.load.fronts.http_client import Connection, Cut, HttpError, request
from serving.core.errors import Kind
from serving.core.events import Delta
from tests.serving.http.fronts import fronted, run
from tests.serving.scripted import ScriptedService, answer, ids_of

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
MIB = 1 << 20
TOKENS = "all the answer"


def target_of(world):
    return f"127.0.0.1:{world.front.port}"


async def asked(connection, target, prompt=TOKENS, stream=False, **more):
    """The ids of the answer to the prompt, on that connection."""
    body = {"prompt": prompt, "stream": stream, "return_token_ids": True, **more}
    connection.send(request(target, PATH, body))
    if not stream:
        return (await connection.answer())["choices"][0]["token_ids"]
    return [token async for event in connection.events() for token in event["choices"][0].get("token_ids", [])]


async def sent_whole(target, raw):
    """The status of the answer to these bytes, which are not copied on their way."""
    reader, writer = await asyncio.open_connection(*target.split(":"))
    whole = memoryview(raw)
    for start in range(0, len(whole), 1 << 16):
        writer.write(whole[start : start + (1 << 16)])
        await writer.drain()
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


def test_bodies_of_a_crowd_take_bounded_memory_and_hold_no_small_one_up():
    size, at_once, most = MIB, 50, 4 * MIB
    body = b'{"max_tokens": 1, "prompt": "' + b"a" * (size - 31) + b'"}'
    raw = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    chunks = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"

    class Short(ScriptedService):
        def generate(self, call, caller):
            return self._played(call.info.request_id, answer("a"))

    async def act():
        async with fronted(Short(), max_body_bytes=size, max_bodies_bytes=most) as world:
            target = target_of(world)
            tracemalloc.start()
            try:
                crowd = [asyncio.create_task(sent_whole(target, (raw, chunks)[place % 2])) for place in range(at_once)]
                await world.service.until(lambda: world.desk.room.taken == most)
                assert (await world.client.post(PATH, json={"prompt": "small"})).status_code == 200
                assert not all(one.done() for one in crowd)
                assert await asyncio.gather(*crowd) == [200] * at_once
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            # The bytes, their text, and the value of each that has room; and what connections hold.
            assert peak < 8 * most, f"{peak / MIB:.0f} MiB for bodies of {most / MIB:.0f} MiB"
            assert world.desk.room.taken == 0

    run(act(), 60)


def test_a_body_that_finds_no_room_in_its_time_is_told_to_come_again():
    async def act():
        service = ScriptedService()
        async with fronted(service, max_body_bytes=MIB, max_bodies_bytes=MIB, body_s=0.5) as world:
            target = target_of(world)
            holding = await Connection.open(target)
            holding.send(HEAD + b"content-length: %d\r\n\r\n" % MIB)
            await service.until(lambda: world.desk.room.taken == MIB)
            leaving = await Connection.open(target)
            leaving.send(HEAD + b"content-length: %d\r\n\r\n{" % (MIB - 1))
            await service.until(lambda: len(world.desk.calls) == 2)
            leaving.close()
            late = await world.client.post(PATH, json={"prompt": "a" * (MIB // 2)})
            # Whoever comes last may find the room that the first left as its time was up.
            assert late.status_code in (200, 503), late.text
            with pytest.raises(HttpError) as told:
                await holding.answer()
            assert told.value.status == 408
            await service.until(lambda: not len(world.desk.calls))
            assert world.desk.room.taken == 0
            assert {error.kind for _, error in service.refusals} <= {
                Kind.TOO_LATE,
                Kind.UNAVAILABLE,
                Kind.CANCELLED,
            }
            holding.close()

    run(act())


@pytest.mark.parametrize("settings, status, pause_s", [({"max_body_bytes": MIB}, 413, 0), ({"body_s": 0.3}, 408, 0.02)])
def test_a_body_that_never_ends_is_ended(settings, status, pause_s):
    async def act():
        service, loop = ScriptedService(), asyncio.get_running_loop()
        async with fronted(service, **settings) as world:
            # Of a bare socket what came is there to be read, also after what is sent was refused.
            with socket.create_connection(("127.0.0.1", world.front.port)) as one:
                one.setblocking(False)

                async def send():
                    await loop.sock_sendall(one, HEAD + b"transfer-encoding: chunked\r\n\r\n")
                    while True:
                        await loop.sock_sendall(one, b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                        await asyncio.sleep(pause_s)

                sending = asyncio.create_task(send())
                assert (await loop.sock_recv(one, 100)).startswith(b"HTTP/1.1 %d " % status)
                # The server closes it, however much more there is.
                with pytest.raises(ConnectionError):
                    await sending
            await service.until(lambda: not len(world.desk.calls))
            assert not service.asked and len(service.refusals) == 1

    run(act(), 40)


def test_a_thousand_idle_connections_hold_nobody_up_and_are_cut_off():
    async def act():
        async with fronted(ScriptedService(), head_s=1.0) as world:
            target = target_of(world)
            idle = [await Connection.open(target) for _ in range(1000)]
            answers = await asyncio.gather(
                *(world.client.post(PATH, json={"prompt": f"a{place}"}) for place in range(20))
            )
            assert [one.json()["choices"][0]["text"] for one in answers] == [f"a{place}" for place in range(20)]
            for one in idle:
                with pytest.raises(Cut):
                    await one.head()
                one.close()

    run(act(), 60)


def test_heads_that_come_a_byte_at_a_time_are_cut_off_and_hold_nobody_up():
    async def act():
        async with fronted(ScriptedService(), head_s=0.5) as world:
            target = target_of(world)
            head, connections = b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 2000, []
            # A connection that has served is no other.
            for place in range(100):
                connections.append(await Connection.open(target))
                if place % 2:
                    assert await asked(connections[-1], target) == list(ids_of(TOKENS))

            async def drip(connection):
                with pytest.raises(Cut):
                    await connection.head()
                connection.close()

            ends = [asyncio.create_task(drip(connection)) for connection in connections]
            for place in range(len(head)):
                if all(end.done() for end in ends):
                    break
                for connection, end in zip(connections, ends, strict=True):
                    if not end.done():
                        connection.send(head[place : place + 1])
                assert (await world.client.get("/health")).status_code == 200
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("a head was waited for without end")
            await asyncio.gather(*ends)

    run(act(), 60)


def test_of_requests_in_a_row_none_begins_once_their_client_has_gone():
    async def act():
        never = asyncio.Event()
        service = ScriptedService((never,))
        async with fronted(service) as world:
            target = target_of(world)
            for way in ("close", "reset"):
                connection = await Connection.open(target)
                connection.send(request(target, PATH, {"prompt": "a"}) * 100)
                await service.until(lambda: len(service.running) == 1)
                getattr(connection, way)()
                await service.until(lambda: not service.running and not len(world.desk.calls))
            assert len(service.asked) == len(service.cancelled) == 2

    run(act())


@asynccontextmanager
async def relayed(target, up_bytes, gathers):
    """A proxy before the server that passes requests on in pieces of `up_bytes` and, if it `gathers`, answers as a
    whole when the server has closed."""

    async def pump(reader, writer, size, whole):
        gathered = b""
        while part := await reader.read(1 << 16):
            gathered += part
            while gathered and not whole:
                writer.write(gathered[:size])
                await writer.drain()
                gathered = gathered[size:]
        writer.write(gathered)
        writer.write_eof()

    async def relay(reader, writer):
        up_reader, up_writer = await asyncio.open_connection(*target.split(":"))
        sending = asyncio.create_task(pump(reader, up_writer, up_bytes, whole=False))
        await pump(up_reader, writer, 1 << 16, whole=gathers)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        up_writer.close()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("up_bytes", [1, 7, 1 << 16])
@pytest.mark.parametrize("gathers", [False, True])
def test_through_a_proxy_that_splits_and_gathers_answers_are_the_same(up_bytes, gathers):
    async def act():
        async with fronted(ScriptedService()) as world, relayed(target_of(world), up_bytes, gathers) as target:
            for stream in (False, True):
                connection = await Connection.open(target)
                body = {"prompt": TOKENS, "stream": stream, "return_token_ids": True}
                connection.send(request(target, PATH, body, {"connection": "close"}))
                if stream:
                    ids = [
                        token
                        async for event in connection.events()
                        for token in event["choices"][0].get("token_ids", [])
                    ]
                else:
                    ids = (await connection.answer())["choices"][0]["token_ids"]
                assert ids == list(ids_of(TOKENS))
                connection.close()

    run(act())


def test_a_stream_asks_proxies_not_to_gather_it():
    async def act():
        async with fronted(ScriptedService()) as world:
            answered = await world.client.post(PATH, json={"prompt": "a", "stream": True})
            assert answered.headers["x-accel-buffering"] == "no" and "no-" in answered.headers["cache-control"]
            assert answered.headers["transfer-encoding"] == "chunked"

    run(act())


ERRORS = [
    (request("a", PATH, b"{"), 400),
    (request("a", PATH, {"prompt": "a", "n": 0}), 400),
    (request("a", PATH, {"prompt": "a", "n": 0, "stream": True}), 400),
    (request("a", PATH, {"prompt": "a"}, {"x-request-timeout": "soon"}), 400),
    (request("a", PATH, {"prompt": "a"}, {"content-type": "text/plain"}), 415),
    (request("a", PATH, b" " * 3000), 413),
    (request("a", "/nothing", {"prompt": "a"}), 404),
    (request("a", "/v1/models", {"prompt": "a"}), 405),
]


@pytest.mark.parametrize("raw, status", ERRORS)
def test_after_an_error_a_connection_serves_the_next_or_says_that_it_ends(raw, status):
    async def act():
        async with fronted(ScriptedService(), max_body_bytes=2000) as world:
            target = target_of(world)
            for _ in range(2):
                connection = await Connection.open(target)
                for _ in range(3):
                    connection.send(raw)
                    with pytest.raises(HttpError) as told:
                        await connection.answer()
                    assert told.value.status == status and "Traceback" not in str(told.value)
                    if not connection.is_fresh:
                        with pytest.raises(Cut):
                            await connection.head()
                        break
                    assert await asked(connection, target, stream=True) == list(ids_of(TOKENS))
                connection.close()

    run(act())


def test_after_a_stream_that_failed_a_connection_serves_the_next():
    async def act():
        service = ScriptedService()
        service.scripts = {"bad": (Delta(0, "a", (97,)), RuntimeError("secret"))}
        async with fronted(service) as world:
            target = target_of(world)
            connection = await Connection.open(target)
            for _ in range(3):
                body = {"prompt": "a", "stream": True}
                connection.send(request(target, PATH, body, {"x-request-id": "bad"}))
                with pytest.raises(HttpError) as told:
                    [event async for event in connection.events()]
                assert (told.value.status, told.value.code) == (200, "internal_error")
                assert "secret" not in str(told.value)
                assert await asked(connection, target) == list(ids_of(TOKENS))
            connection.close()

    run(act())
