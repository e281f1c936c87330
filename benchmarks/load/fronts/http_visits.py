# SPDX-License-Identifier: Apache-2.0
"""What a stream of a soak does over HTTP: asks and checks, leaves in every way, dawdles, errs on purpose."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.load.fronts.http_client import Connection, Cut, HttpError, request
from benchmarks.load.visits import PATIENCE_S, Visit, WrongAnswer

if TYPE_CHECKING:
    from benchmarks.load.fronts.http import HttpClients

PATH = "/v1/completions"
TIMEOUT_HEADER = "x-request-timeout"
HALF_SENT_S = 0.3
# What is changed of a request or its headers, and the status and `param` that say so.
WRONG = (
    ({"temperature": -1}, {}, 400, "temperature"),
    ({"n": 0}, {}, 400, "n"),
    ({"top_p": 2}, {}, 400, "top_p"),
    ({"regex": "("}, {}, 400, "regex"),
    ({"prompt": [-1]}, {}, 400, "prompt"),
    ({"nonsense": 1}, {}, 400, "nonsense"),
    ({"model": "no-such-model"}, {}, 404, "model"),
    ({}, {TIMEOUT_HEADER: "soon"}, 400, TIMEOUT_HEADER),
    ({}, {"content-type": "text/plain"}, 415, "content-type"),
)
# What a deadline may come to: nobody waits for what cannot be ready in time.
IN_A_HURRY = {"timeout", "rate_limit_exceeded"}


def body_of(known: dict, stream: bool = False, **more: Any) -> dict:
    """The body that asks for it."""
    asked = {"prompt": known["prompt"], **known["params"], "return_token_ids": True}
    return asked | ({"stream": True} if stream else {}) | more


async def whole(clients: "HttpClients", visit: Visit) -> str:
    """A whole answer at once, on a connection that others had."""
    known, started_s = visit.any(), time.monotonic()
    async with _kept(clients) as connection:
        _ask(clients, connection, body_of(known))
        _finish(visit, known, await connection.answer())
    visit.unhindered(known, started_s)
    return "ok"


async def fresh(clients: "HttpClients", visit: Visit) -> str:
    """A whole answer on a connection for it alone, which the server closes."""
    known = visit.any()
    async with _own(clients) as connection:
        _ask(clients, connection, body_of(known), {"connection": "close"})
        _finish(visit, known, await connection.answer())
        try:
            await connection.head()
        except Cut:
            return "ok"
    raise WrongAnswer("the server kept a connection that was to be closed")


async def streamed(clients: "HttpClients", visit: Visit) -> str:
    """Piece by piece, to the end."""
    known, started_s = visit.any(), time.monotonic()
    async with _kept(clients) as connection:
        _ask(clients, connection, body_of(known, stream=True))
        await _read(visit, connection, known)
    visit.unhindered(known, started_s)
    return "ok"


async def slow(clients: "HttpClients", visit: Visit) -> str:
    """Piece by piece, with pauses."""
    known = visit.any()
    async with _kept(clients) as connection:
        _ask(clients, connection, body_of(known, stream=True))
        await _read(visit, connection, known, visit.dawdling_s())
    return "ok"


async def left(clients: "HttpClients", visit: Visit) -> str:
    """Some pieces, then the connection is closed."""
    async with _own(clients) as connection:
        await _some(clients, visit, connection)
    return "left"


async def reset(clients: "HttpClients", visit: Visit) -> str:
    """Some pieces, then the connection is lost."""
    async with _own(clients) as connection:
        await _some(clients, visit, connection)
        connection.reset()
    return "left"


async def half_sent(clients: "HttpClients", visit: Visit) -> str:
    """A part of a request, and no more of it."""
    raw = request(clients.target, PATH, body_of(visit.any()))
    async with _own(clients) as connection:
        connection.send(raw[: visit.draw.randrange(len(raw))])
        await asyncio.sleep(visit.draw.uniform(0, HALF_SENT_S))
        visit.draw.choice((connection.close, connection.reset))()
    return "left"


async def pipelined(clients: "HttpClients", visit: Visit) -> str:
    """Two requests at once on one connection: both are answered, in their order."""
    pair = visit.any(), visit.any()
    async with _kept(clients) as connection:
        connection.send(b"".join(request(clients.target, PATH, body_of(known)) for known in pair))
        for known in pair:
            _finish(visit, known, await connection.answer())
    return "ok"


async def hurried(clients: "HttpClients", visit: Visit) -> str:
    """A deadline that is mostly too short: the right answer, or the right status."""
    known, stream = visit.any(), visit.draw.random() < 0.5
    async with _kept(clients) as connection:
        _ask(clients, connection, body_of(known, stream), {TIMEOUT_HEADER: f"{visit.hurry_s():.4f}"})
        try:
            if stream:
                await _read(visit, connection, known)
            else:
                _finish(visit, known, await connection.answer())
        except HttpError as error:
            if error.code not in IN_A_HURRY:
                raise
            return error.code
    return "ok"


async def wrong(clients: "HttpClients", visit: Visit) -> str:
    """A request that cannot be served and an answer that says so; where the connection stays it serves the next."""
    known = visit.any()
    changed, headers, status, param = visit.draw.choice(WRONG)
    stream = visit.draw.random() < 0.5
    async with _kept(clients) as connection:
        _ask(clients, connection, body_of(known, stream, **changed), headers)
        try:
            await connection.answer()
        except HttpError as error:
            if (error.status, error.param) != (status, param):
                raise
        else:
            raise WrongAnswer(f"{changed or headers} was answered, and is no request")
        if connection.is_fresh:
            _ask(clients, connection, body_of(known))
            _finish(visit, known, await connection.answer())
    return str(status)


@asynccontextmanager
async def _kept(clients: "HttpClients") -> AsyncIterator[Connection]:
    """A connection of all; who fails on it closes it."""
    connection = await clients.connections.take()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield connection
    except BaseException as error:
        connection.close()
        raise _patient(error) from error
    clients.connections.keep(connection)


@asynccontextmanager
async def _own(clients: "HttpClients") -> AsyncIterator[Connection]:
    """A connection that is closed."""
    connection = await Connection.open(clients.target)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield connection
    except TimeoutError as error:
        raise _patient(error) from error
    finally:
        connection.close()


def _patient(error: BaseException) -> BaseException:
    return WrongAnswer(f"no answer within {PATIENCE_S} s") if isinstance(error, TimeoutError) else error


def _ask(clients: "HttpClients", connection: Connection, body: dict, headers: dict | None = None) -> None:
    connection.send(request(clients.target, PATH, body, headers))


def _finish(visit: Visit, known: dict, answer: dict) -> None:
    [choice] = answer["choices"]
    visit.finish(known, choice["token_ids"], choice["text"])


async def _read(visit: Visit, connection: Connection, known: dict, pause_s: float = 0.0) -> None:
    """All of a stream, held against what is known."""
    ids, text, reason = [], "", None
    async for event in connection.events():
        [choice] = event["choices"]
        ids += choice.get("token_ids", [])
        text += choice["text"]
        reason = choice["finish_reason"] or reason
        visit.check_begin(known, ids)
        if pause_s:
            await asyncio.sleep(pause_s)
    if reason is None:
        raise WrongAnswer("the stream ended without saying why")
    visit.finish(known, ids, text)


async def _some(clients: "HttpClients", visit: Visit, connection: Connection) -> None:
    """Some pieces of a stream."""
    known, ids, most = visit.any(), [], visit.few()
    _ask(clients, connection, body_of(known, stream=True))
    # Some leave at once: before their request is there, as it is read, as it is answered.
    await asyncio.sleep(visit.draw.choice((0.0, 0.01, 0.1)))
    if most == 0:
        return
    async with aclosing(connection.events()) as events:
        async for event in events:
            ids += event["choices"][0].get("token_ids", [])
            most -= 1
            if most <= 0:
                break
    visit.check_begin(known, ids)


# How often, and what.
BEHAVIOURS: dict[str, tuple[int, Callable[["HttpClients", Visit], Awaitable[str]]]] = {
    "whole": (15, whole),
    "fresh": (6, fresh),
    "streamed": (28, streamed),
    "slow": (8, slow),
    "left": (10, left),
    "reset": (8, reset),
    "half_sent": (6, half_sent),
    "pipelined": (4, pipelined),
    "hurried": (8, hurried),
    "wrong": (7, wrong),
}
