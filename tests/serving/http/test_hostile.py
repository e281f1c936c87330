# SPDX-License-Identifier: Apache-2.0
"""Clients that send garbage, too much, half of it, or do not read."""

import asyncio
import json
import socket

import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.http import chat, completions, embeddings, tokens
from tests.serving.http.fronts import error_of, events_of, fronted, run
from tests.serving.scripted import ScriptedService, answer

URL = "/v1/completions"
JSON = {"content-type": "application/json"}
MIB = 1 << 20
BODIES = {
    "nothing": (b"", "no JSON"),
    "half": (b'{"prompt": "a"', "no JSON"),
    "list": (b"[1]", "an array"),
    "text": (b'"a"', "a string"),
    "null": (b"null", "null"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
    "overflow": (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
    "digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "integer of thousands of digits"),
    "twice": (b'{"prompt": "a", "prompt": "b"}', "twice"),
    "twice below": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "twice"),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    "deep objects": (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "nested"),
    "latin": ('{"prompt": "é"}'.encode("latin-1"), "UTF-8"),
    "bom": (b'\xef\xbb\xbf{"prompt": "a"}', "no JSON"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
    "surrogate": (b'{"prompt": "\\ud800"}', "surrogate"),
    "surrogate name": (b'{"\\udfff": 1}', "surrogate"),
    "two": (b'{"prompt": "a"}{"prompt": "b"}', "no JSON"),
    "control": (b'{"prompt": "a\x00"}', "no JSON"),
    "large number": (b'{"prompt": [1e400]}', "out of range"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_strict_json_object_is_refused(name):
    raw, words = BODIES[name]

    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            error = error_of(await world.client.post(URL, content=raw, headers=JSON), 400)
            assert words in error["message"] and len(error["message"]) < 400 and not service.asked
            assert (await world.client.post(URL, json={"prompt": "a"})).status_code == 200

    run(act())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_types_are_refused(headers):
    async def act():
        async with fronted(ScriptedService()) as world:
            error_of(await world.client.post(URL, content=b'{"prompt": "a"}', headers=headers), 415)

    run(act())


def test_a_body_over_the_limit_is_refused_with_and_without_a_length():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            whole = b'{"prompt": "' + b"a" * (33 * MIB) + b'"}'

            async def pieces():
                for start in range(0, len(whole), MIB):
                    yield whole[start : start + MIB]

            for content in (whole, pieces()):
                error = error_of(await world.client.post(URL, content=content, headers=JSON), 413)
                assert str(32 * MIB) in error["message"] and not service.asked
            near = b'{"prompt": "' + b"a" * (MIB) + b'", "max_tokens": 1}'
            assert (await world.client.post(URL, content=near, headers=JSON)).status_code == 200

    run(act())


def test_who_asks_before_it_sends_too_much_is_told_before_it_does():
    async def act():
        async with fronted(ScriptedService()) as world:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            back = await world.raw(head + b"expect: 100-continue\r\ncontent-length: 34603008\r\n\r\n")
            assert back.startswith(b"HTTP/1.1 413 ") and b"connection: close" in back.lower()

    run(act())


def test_a_stranger_is_turned_away_before_its_body_is_read():
    async def act():
        async with fronted(ScriptedService(keys={})) as world:
            back = await world.raw(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
            assert back.startswith(b"HTTP/1.1 401 ") and b"connection: close" in back.lower()

    run(act())


def test_half_a_body_is_not_waited_for_without_end():
    async def act():
        service = ScriptedService()
        async with fronted(service, body_s=0.1) as world:
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            writer.write(head + b'\r\n{"prompt"')
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            writer.write(head + b'\r\n{"prompt"')
            writer.close()
            await service.until(lambda: len(service.refusals) == 2)
            assert [error.kind for _, error in service.refusals] == [Kind.TOO_LATE, Kind.CANCELLED]
            await service.until(lambda: not len(world.desk.calls))

    run(act())


def test_a_body_is_waited_for_no_longer_than_its_sender_waits():
    async def act():
        async with fronted(ScriptedService()) as world:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            back = await world.raw(head + b"x-request-timeout: 0.1\r\ncontent-length: 99\r\n\r\n{")
            assert back.startswith(b"HTTP/1.1 408 ")

    run(act())


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_amid_an_answer_ends_it(stream):
    async def act():
        never = asyncio.Event()
        service = ScriptedService((*answer("ab")[:2], never))
        async with fronted(service) as world:
            body = json.dumps({"prompt": "a", "stream": stream}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            writer.write(_request(body))
            await service.until(lambda: service.num_pulled == 2)
            writer.close()
            await service.until(lambda: len(service.cancelled) == 1)
            await service.until(lambda: not len(world.desk.calls))
            # The service has its record of it.
            assert not service.refusals

    run(act())


def test_a_slow_reader_stops_what_is_pulled_and_is_given_up_in_time():
    script = tuple(Delta(0, "x" * 10_000) for _ in range(10_000))

    async def act():
        service = ScriptedService(script)
        async with fronted(service, write_s=0.3) as world:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", world.front.port))
            slow.sendall(_request(b'{"prompt": "a", "stream": true}'))
            await service.until(lambda: service.num_pulled > 0)
            assert (await world.client.get("/health")).status_code == 200
            await service.until(lambda: len(service.cancelled) == 1)
            assert service.num_pulled < len(script) // 2
            assert [error.kind for _, error in service.refusals] == [Kind.TOO_LATE]
            slow.close()

    run(act())


def test_requests_in_a_row_on_one_connection_are_answered_in_turn():
    async def act():
        async with fronted(ScriptedService()) as world:
            sent = b"".join(_request(json.dumps({"prompt": letter}).encode()) for letter in "abc")
            back = await world.raw(sent + b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert back.count(b"HTTP/1.1 200 ") == 4
            places = [back.index(b'"text":"%b"' % letter) for letter in (b"a", b"b", b"c")]
            assert places == sorted(places)

    run(act())


SECOND = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"
SMUGGLED = {
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunks": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    "other coding": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "no length": b"content-length: -1\r\n\r\n",
    "plus": b"content-length: +2\r\n\r\n{}",
    "space before colon": b"content-length : 2\r\n\r\n{}",
    "folded": b"connection: close\r\nx-a: b\r\n c\r\ncontent-length: 2\r\n\r\n{}",
    "bare return": b"x-a: b\rc\r\ncontent-length: 2\r\n\r\n{}",
    "zero byte": b"x-a: b\x00c\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_heads_that_readers_disagree_about_begin_no_second_request(name):
    async def act():
        service = ScriptedService()
        async with fronted(service, head_s=0.2) as world:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            back = await world.raw(head + SMUGGLED[name])
            assert back.count(b"HTTP/1.1 ") <= 1 and b"HTTP/1.1 2" not in back and not service.asked

    run(act())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET " + b"/x" * 400_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x-a: b\r\n" * 20_000,
        b"GET / HTTP/1.1\r\nhost: a\r\nx-a: " + b"b" * 200_000,
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_what_is_no_request_is_a_400_and_the_end(sent):
    async def act():
        async with fronted(ScriptedService()) as world:
            try:
                back = await world.raw(sent)
            except ConnectionError:
                assert len(sent) > 1 << 16, "what was still on its way may have come to a closed door"
            else:
                head, _, body = back.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
                assert json.loads(body)["error"]["type"] == "invalid_request_error"
            assert (await world.client.get("/health")).status_code == 200

    run(act())


def test_calls_over_the_limit_are_told_to_come_again():
    async def act():
        goes = asyncio.Event()
        service = ScriptedService((goes, *answer("a")))
        async with fronted(service, max_calls=1) as world:
            first = asyncio.create_task(world.client.post(URL, json={"prompt": "a"}))
            await service.until(lambda: len(service.running) == 1)
            refused = await world.client.post(URL, json={"prompt": "b"})
            assert error_of(refused, 503) and refused.headers["retry-after"] == "1"
            assert len(refused.headers["x-request-id"]) == 32
            goes.set()
            assert (await first).status_code == 200

    run(act())


def test_a_drain_lets_calls_end_and_a_stop_tells_those_that_are_left():
    async def act():
        goes, never = asyncio.Event(), asyncio.Event()
        service = ScriptedService()
        service.scripts = {"ends": (goes, *answer("a")), "stays": (*answer("b")[:1], never), "waits": (never,)}
        async with fronted(service) as world:
            ends, waits = (
                asyncio.create_task(world.client.post(URL, json={"prompt": "a"}, headers={"x-request-id": name}))
                for name in ("ends", "waits")
            )
            stays = asyncio.create_task(
                world.client.post(URL, json={"prompt": "a", "stream": True}, headers={"x-request-id": "stays"})
            )
            await service.until(lambda: len(service.running) == 3)
            draining = asyncio.create_task(world.front.drain(0.4))
            await asyncio.sleep(0)
            late = await world.client.post(URL, json={"prompt": "a"})
            assert "shutting down" in error_of(late, 503)["message"]
            assert (late.headers["connection"], late.headers["retry-after"]) == ("close", "1")
            assert (await world.client.get("/health")).status_code == 200
            goes.set()
            assert (await ends).json()["choices"][0]["text"] == "a"
            await draining
            assert "shutting down" in error_of(await waits, 503)["message"]
            assert "shutting down" in events_of((await stays).text)[-1]["error"]["message"]
            assert sorted(service.cancelled) == ["stays", "waits"] and len(service.refusals) == 1
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", world.front.port)

    run(act())


def test_a_call_that_comes_while_the_server_drains_is_refused():
    async def act():
        service = ScriptedService((ServiceError(Kind.UNAVAILABLE, "no."),))
        async with fronted(service) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await world.front.stop()
            writer.write(_request(b'{"prompt": "a"}'))
            rest = await reader.read()
            assert b"HTTP/1.1 200" not in rest and not service.asked
            writer.close()

    run(act())


def _request(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


ODD = (None, True, 0, -1, 2**70, 0.5, 1e308, "", "a", "\u0000", [], [[]], [1, "a"], [None], {}, {"a": {}}, [{"b": []}])


@pytest.mark.parametrize(
    "url, whole, fields",
    [
        (URL, {"prompt": "a"}, completions.BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, chat.BODY),
        ("/v1/embeddings", {"input": "a"}, embeddings.FIELDS),
        ("/tokenize", {"prompt": "a"}, tokens.OF_TEXT),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, tokens.OF_CHAT),
        ("/detokenize", {"tokens": [97]}, tokens.OF_TEXT),
    ],
)
def test_no_value_of_any_field_is_unforeseen(url, whole, fields):
    async def act():
        service = ScriptedService(answer("a"))
        async with fronted(service) as world:
            for name in fields:
                for value in ODD:
                    answered = await world.client.post(url, json=whole | {name: value})
                    assert answered.status_code in (200, 400), (name, value, answered.text)
                    if answered.status_code == 400:
                        error = error_of(answered, 400)
                        assert len(error["message"]) < 2000 and error["type"] == "invalid_request_error"

    run(act(), 180)
