# SPDX-License-Identifier: Apache-2.0
"""A call through the tunnel: what the application sees, what comes back, and what ends when the caller goes."""

import asyncio
import pickle

import pytest

from serving.asgi_tunnel import MAX_PIECES, Asked, Head, answered

ASKED = Asked("POST", "/v1/ä", b"a=1", ((b"host", b"h"), (b"x-api-key", b"k")), b'{"a": 1}', ("10.0.0.1", 5))
START = {"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]}


def body(text, more=True):
    return {"type": "http.response.body", "body": text, "more_body": more}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def all_of(app, asked=ASKED):
    return [piece async for piece in answered(app, asked)]


def test_the_application_sees_the_call_and_its_answer_comes_back_in_pieces():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, message=await receive())
        await send(START)
        for text in (b"one", b"", b"two"):
            await send(body(text))
        await send(body(b"", more=False))

    assert run(all_of(app)) == [Head(201, ((b"content-type", b"text/plain"),)), b"one", b"two"]
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/v1/ä", b"a=1")
    assert (seen["headers"], seen["client"]) == (list(ASKED.headers), ("10.0.0.1", 5))
    assert seen["message"] == {"type": "http.request", "body": ASKED.body, "more_body": False}


def test_calls_and_heads_go_through_a_pickle():
    assert pickle.loads(pickle.dumps((ASKED, Head(200, ())))) == (ASKED, Head(200, ()))


def test_what_belongs_to_a_connection_stays_there():
    async def app(scope, receive, send):
        await send(START | {"headers": [(b"Transfer-Encoding", b"chunked"), (b"connection", b"close"), (b"a", b"b")]})
        await send(body(b"", more=False))

    assert run(all_of(app)) == [Head(201, ((b"a", b"b"),))]


def test_pieces_pass_as_they_come():
    async def main():
        goes = asyncio.Event()

        async def app(scope, receive, send):
            await send(START)
            await send(body(b"one"))
            await goes.wait()
            await send(body(b"two", more=False))

        pieces = answered(app, ASKED)
        assert [await anext(pieces), await anext(pieces)] == [Head(201, ((b"content-type", b"text/plain"),)), b"one"]
        goes.set()
        assert [piece async for piece in pieces] == [b"two"]

    run(main())


def test_an_application_does_not_run_ahead_of_a_slow_caller():
    async def main():
        sent = 0

        async def app(scope, receive, send):
            nonlocal sent
            await send(START)
            while True:
                await send(body(b"x"))
                sent += 1

        pieces = answered(app, ASKED)
        await anext(pieces)
        await anext(pieces)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sent <= MAX_PIECES + 2
        await pieces.aclose()

    run(main())


@pytest.mark.parametrize("listens", [True, False], ids=["told", "cancelled"])
def test_a_caller_that_goes_ends_the_application(listens):
    async def main():
        ended, before = [], asyncio.all_tasks()

        async def app(scope, receive, send):
            await receive()
            await send(START)
            try:
                if listens:
                    ended.append((await receive())["type"])
                else:
                    for _ in range(MAX_PIECES + 1):
                        await send(body(b"x"))
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        pieces = answered(app, ASKED)
        await anext(pieces)
        await asyncio.sleep(0.01)
        await pieces.aclose()
        assert ended == ["http.disconnect" if listens else "cancelled"]
        assert asyncio.all_tasks() == before

    run(main())


def test_what_the_application_raises_comes_after_what_it_sent():
    async def app(scope, receive, send):
        await send(START)
        await send(body(b"one"))
        raise ValueError("broken")

    async def main():
        got = []
        with pytest.raises(ValueError, match="broken"):
            async for piece in answered(app, ASKED):
                got.append(piece)
        assert got[1:] == [b"one"]

    run(main())
