# SPDX-License-Identifier: Apache-2.0
"""The load's own client of HTTP, against bytes that a test writes down."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from benchmarks.load.fronts.http_client import Connection, Connections, Cut, HttpError, request

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def sized(status: str, body: bytes, *lines: bytes) -> bytes:
    head = (f"HTTP/1.1 {status}".encode(), b"Content-Length: %d" % len(body), *lines, b"", b"")
    return b"\r\n".join(head) + body


@asynccontextmanager
async def saying(*answers: bytes, size: int = 1 << 20):
    """A server that says these answers, `size` bytes at a time, to whoever connects."""

    async def say(reader, writer):
        for answer in answers:
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def talk(test, *answers: bytes, size: int = 1 << 20):
    """What `test(connection)` gives with these answers before it."""

    async def act():
        async with asyncio.timeout(10), saying(*answers, size=size) as target:
            connection = await Connection.open(target)
            try:
                return await test(connection)
            finally:
                connection.close()

    return asyncio.run(act())


async def values(connection):
    return [value async for value in connection.events()]


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_events_are_found_however_their_bytes_come(size):
    told = b': still at work\n\ndata: {"a": 1}\n\n', b'data: {"a"', b": 2}\n\ndata: [DO", b"NE]\n\n"

    async def twice(connection):
        return await values(connection), await connection.answer()

    assert talk(twice, STREAM + chunked(*told), sized("200 OK", b"[3]"), size=size) == ([{"a": 1}, {"a": 2}], [3])


def test_errors_before_and_among_events_are_raised_with_what_they_say():
    error = b'{"error": {"message": "no.", "param": "n", "code": "timeout"}}'
    for answer, status in (
        (sized("408 Request Timeout", error), 408),
        (STREAM + chunked(b"data: {}\n\n", b"data: " + error + b"\n\n"), 200),
    ):
        with pytest.raises(HttpError) as told:
            talk(values, answer)
        assert (told.value.status, told.value.code, told.value.param) == (status, "timeout", "n")


@pytest.mark.parametrize(
    "answer",
    [
        STREAM + chunked(b"data: {}\n\n"),
        STREAM + chunked(b"data: [DONE]\n\n", b"data: {}\n\n"),
        STREAM + b"a\r\ndata",
        b"HTTP/1.1 200",
        b"",
    ],
)
def test_streams_without_their_end_are_told(answer):
    with pytest.raises(Cut):
        talk(values, answer)


def test_connections_that_the_server_closes_are_not_used_again():
    async def act():
        async with saying(sized("200 OK", b"1", b"Connection: close")) as target:
            connections = Connections(target)
            one = await connections.take()
            one.send(request(target, "/", {}))
            connections.keep(one)
            assert await connections.take() is one
            assert await one.answer() == 1
            connections.keep(one)
            other = await connections.take()
            assert other is not one
            other.reset()
        with pytest.raises(Cut):
            await Connection.open(target)

    asyncio.run(act())
