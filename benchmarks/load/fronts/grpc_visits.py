# SPDX-License-Identifier: Apache-2.0
"""What a stream of a soak does over gRPC: asks and checks, leaves, dawdles, errs on purpose."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.load.visits import PATIENCE_S, Visit, WrongAnswer
from serving.client import (
    AsyncClient,
    CallCancelledError,
    ClientError,
    DeadlineError,
    ExhaustedError,
    Piece,
    RetryPolicy,
)
from serving.client.session import Session

if TYPE_CHECKING:
    from benchmarks.load.fronts.grpc import GrpcClients

# Retries would hide what a soak looks for.
ONCE = RetryPolicy(max_attempts=1)
WRONG = (
    ({"temperature": -1}, "INVALID_ARGUMENT"),
    ({"n": 0}, "INVALID_ARGUMENT"),
    ({"top_p": 2}, "INVALID_ARGUMENT"),
    ({"regex": "("}, "INVALID_ARGUMENT"),
    ({"model": "no-such-model"}, "NOT_FOUND"),
)


async def whole(clients: "GrpcClients", visit: Visit) -> str:
    """A whole answer at once."""
    known, started_s = visit.any(), time.monotonic()
    found = await clients.client.generate(known["prompt"], **known["params"], timeout_s=PATIENCE_S)
    visit.finish(known, found.token_ids, found.text)
    visit.unhindered(known, started_s)
    return "ok"


async def streamed(clients: "GrpcClients", visit: Visit) -> str:
    """Piece by piece, to the end."""
    known, started_s = visit.any(), time.monotonic()
    await _read(visit, _stream(clients.client, known), known)
    visit.unhindered(known, started_s)
    return "ok"


async def slow(clients: "GrpcClients", visit: Visit) -> str:
    """Piece by piece, with pauses."""
    known = visit.any()
    await _read(visit, _stream(clients.client, known), known, visit.dawdling_s())
    return "ok"


async def cancelled(clients: "GrpcClients", visit: Visit) -> str:
    """Some pieces, and no interest in more."""
    known = visit.any()
    async with _stream(clients.client, known) as stream:
        await _some(visit, stream, known)
    return "left"


async def disconnected(clients: "GrpcClients", visit: Visit) -> str:
    """A connection of its own that ends amid an answer."""
    known = visit.any()
    async with AsyncClient(clients.target, retries=ONCE) as client:
        await _some(visit, _stream(client, known), known)
    return "left"


async def half_closed(clients: "GrpcClients", visit: Visit) -> str:
    """Two requests on one call whose sending half is closed at once: both are answered."""
    async with clients.client.session() as session:
        _, pairs = _two(visit, session)
        await asyncio.gather(session.finish(), *(_read(visit, stream, known) for stream, known in pairs))
    return "ok"


async def taken_back(clients: "GrpcClients", visit: Visit) -> str:
    """Two requests on one call, one of which is cancelled by its id: the other is answered."""
    async with clients.client.session() as session:
        request_id, [(one, known), (other, known_too)] = _two(visit, session)
        await asyncio.gather(_take_back(visit, session, request_id, one, known), _read(visit, other, known_too))
    return "ok"


async def hurried(clients: "GrpcClients", visit: Visit) -> str:
    """A deadline that is mostly too short: the right answer, or the right status."""
    known = visit.any()
    try:
        await _read(visit, _stream(clients.client, known, visit.hurry_s()), known)
    except (DeadlineError, ExhaustedError) as error:
        # A server may say at once that its queue is longer than that.
        return error.code
    return "ok"


async def wrong(clients: "GrpcClients", visit: Visit) -> str:
    """A request that cannot be served, and a status that says so."""
    params, code = visit.draw.choice(WRONG)
    try:
        await clients.client.generate(visit.any()["prompt"], **params, timeout_s=PATIENCE_S)
    except ClientError as error:
        if error.code != code:
            raise
        if code == "INVALID_ARGUMENT" and not error.field:
            raise WrongAnswer(f"{params} was refused without naming the field: {error}") from error
        return code
    raise WrongAnswer(f"{params} was answered, and is no request")


def _stream(client: AsyncClient, known: dict, timeout_s: float = PATIENCE_S):
    return client.stream(known["prompt"], **known["params"], timeout_s=timeout_s)


def _two(visit: Visit, session: Session) -> tuple[str, list[tuple]]:
    """The id of the first request, and both streams with what is known."""
    request_ids, pairs = [f"{visit.draw.getrandbits(64):x}" for _ in range(2)], []
    for request_id in request_ids:
        known = visit.any()
        stream = session.stream(known["prompt"], **known["params"], request_id=request_id, timeout_s=PATIENCE_S)
        pairs.append((stream, known))
    return request_ids[0], pairs


async def _read(visit: Visit, stream, known: dict, pause_s: float = 0.0) -> None:
    """All of a stream, held against what is known."""
    pieces: list[Piece] = []
    async with stream:
        async for piece in stream:
            pieces.append(piece)
            visit.check_begin(known, _ids(pieces))
            if pause_s:
                await asyncio.sleep(pause_s)
    if "".join(pieces) != stream.result.text:
        raise WrongAnswer(f"pieces {''.join(pieces)!r} are not the text {stream.result.text!r}")
    if tuple(_ids(pieces)) != stream.result.token_ids:
        raise WrongAnswer("the ids of the pieces are not those of the answer")
    visit.finish(known, stream.result.token_ids, stream.result.text)


async def _take_back(visit: Visit, session: Session, request_id: str, stream, known: dict) -> None:
    """Some pieces of a request of a session, which then ends by its id."""
    await _some(visit, stream, known)
    if session.cancel(request_id):
        # What came before the cancel is still there to be read.
        with contextlib.suppress(CallCancelledError):
            async for _ in stream:
                pass


async def _some(visit: Visit, stream, known: dict) -> None:
    """Some pieces of a stream."""
    pieces: list[Piece] = []
    for _ in range(visit.few()):
        piece = await anext(stream, None)
        if piece is None:
            break
        pieces.append(piece)
    visit.check_begin(known, _ids(pieces))


def _ids(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


# How often, and what.
BEHAVIOURS: dict[str, tuple[int, Callable[["GrpcClients", Visit], Awaitable[str]]]] = {
    "whole": (15, whole),
    "streamed": (30, streamed),
    "slow": (8, slow),
    "cancelled": (15, cancelled),
    "disconnected": (8, disconnected),
    "half_closed": (6, half_closed),
    "taken_back": (6, taken_back),
    "hurried": (8, hurried),
    "wrong": (4, wrong),
}
