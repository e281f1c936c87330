# SPDX-License-Identifier: Apache-2.0
"""What one stream of a soak does, by chance of a seed: asks and checks, leaves, dawdles, errs on purpose."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

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

# Retries would hide what a soak looks for.
ONCE = RetryPolicy(max_attempts=1)
# Nobody waits longer for anything that is not meant to be slow.
PATIENCE_S = 300
HURRY_S = (0.002, 1.5)
DAWDLE_S = (0.01, 0.2)
MAX_KEPT_FAULTS = 20
# A server that is gone is not asked a thousand times a second.
FAULT_PAUSE_S = 1.0
WRONG = (
    ({"temperature": -1}, "INVALID_ARGUMENT"),
    ({"n": 0}, "INVALID_ARGUMENT"),
    ({"top_p": 2}, "INVALID_ARGUMENT"),
    ({"regex": "("}, "INVALID_ARGUMENT"),
    ({"model": "no-such-model"}, "NOT_FOUND"),
)


class WrongAnswer(Exception):
    """Tokens that are not the known ones, or a status that was not provoked."""


@dataclass
class Tally:
    """What came of a stream: `outcomes` counts (behaviour, outcome); `finished` requests gave their whole answers, of
    `tokens` together; those of them that nothing on this side slowed took `unhindered_s` for `unhindered_tokens`.
    `faults` are in words, `num_faults` counts them all."""

    finished: int = 0
    tokens: int = 0
    unhindered_tokens: int = 0
    unhindered_s: float = 0.0
    num_faults: int = 0
    longest_s: float = 0.0
    outcomes: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Visitor:
    """One stream against a server whose answers to `known` requests (prompt, params, token_ids) are known."""

    def __init__(self, client: AsyncClient, target: str, known: Sequence[dict], seed: str):
        self._client, self._target, self._known = client, target, known
        self._draw = random.Random(seed)
        self._last_ids: list[str] = []
        self.tally = Tally()

    async def run(self, until_s: float) -> None:
        """One behaviour after the other until the clock says so; each is checked."""
        names, weights = list(BEHAVIOURS), [weight for weight, _ in BEHAVIOURS.values()]
        while time.monotonic() < until_s:
            [name] = self._draw.choices(names, weights)
            started_s = time.monotonic()
            try:
                outcome = await BEHAVIOURS[name][1](self)
            except (ClientError, WrongAnswer) as error:
                outcome = error.code if isinstance(error, ClientError) else "wrong"
                outcome = f"fault {outcome}"
                self.tally.num_faults += 1
                if len(self.tally.faults) < MAX_KEPT_FAULTS:
                    self.tally.faults.append(f"{name}: {type(error).__name__} {error}")
                await asyncio.sleep(FAULT_PAUSE_S)
            self.tally.outcomes[f"{name} {outcome}"] += 1
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - started_s)

    async def whole(self) -> str:
        """A whole answer at once."""
        known, started_s = self._any(), time.monotonic()
        found = await self._client.generate(known["prompt"], **known["params"], timeout_s=PATIENCE_S)
        self._finish(known, found.token_ids)
        self._unhindered(known, started_s)
        return "ok"

    async def streamed(self) -> str:
        """Piece by piece, to the end."""
        known, started_s = self._any(), time.monotonic()
        await self._read(self._client.stream(known["prompt"], **known["params"], timeout_s=PATIENCE_S), known)
        self._unhindered(known, started_s)
        return "ok"

    async def slow(self) -> str:
        """Piece by piece, with pauses."""
        known = self._any()
        stream = self._client.stream(known["prompt"], **known["params"], timeout_s=PATIENCE_S)
        await self._read(stream, known, self._draw.uniform(*DAWDLE_S))
        return "ok"

    async def cancelled(self) -> str:
        """Some pieces, and no interest in more."""
        known = self._any()
        async with self._client.stream(known["prompt"], **known["params"], timeout_s=PATIENCE_S) as stream:
            await self._some(stream, known)
        return "left"

    async def disconnected(self) -> str:
        """A connection of its own that ends amid an answer."""
        known = self._any()
        async with AsyncClient(self._target, retries=ONCE) as client:
            stream = client.stream(known["prompt"], **known["params"], timeout_s=PATIENCE_S)
            await self._some(stream, known)
        return "left"

    async def half_closed(self) -> str:
        """Two requests on one call whose sending half is closed at once: both are answered."""
        async with self._client.session() as session:
            pairs = self._two(session)
            await asyncio.gather(session.finish(), *(self._read(stream, known) for stream, known in pairs))
        return "ok"

    async def taken_back(self) -> str:
        """Two requests on one call, one of which is cancelled by its id: the other is answered."""
        async with self._client.session() as session:
            (one, known), (other, known_too) = self._two(session)
            await asyncio.gather(self._take_back(session, one, known), self._read(other, known_too))
        return "ok"

    async def hurried(self) -> str:
        """A deadline that is mostly too short: the right answer, or the right status."""
        known = self._any()
        try:
            within_s = self._draw.uniform(*HURRY_S)
            stream = self._client.stream(known["prompt"], **known["params"], timeout_s=within_s)
            await self._read(stream, known)
        except (DeadlineError, ExhaustedError) as error:
            # A server may say at once that its queue is longer than that.
            return error.code
        return "ok"

    async def wrong(self) -> str:
        """A request that cannot be served, and a status that says so."""
        params, code = self._draw.choice(WRONG)
        try:
            await self._client.generate(self._any()["prompt"], **params, timeout_s=PATIENCE_S)
        except ClientError as error:
            if error.code != code:
                raise
            if code == "INVALID_ARGUMENT" and not error.field:
                raise WrongAnswer(f"{params} was refused without naming the field: {error}") from error
            return code
        raise WrongAnswer(f"{params} was answered, and is no request")

    def _any(self) -> dict:
        return self._draw.choice(self._known)

    def _two(self, session: Session) -> list[tuple]:
        self._last_ids = [f"{self._draw.getrandbits(64):x}" for _ in range(2)]
        pairs = []
        for request_id in self._last_ids:
            known = self._any()
            stream = session.stream(known["prompt"], **known["params"], request_id=request_id, timeout_s=PATIENCE_S)
            pairs.append((stream, known))
        return pairs

    async def _read(self, stream, known: dict, pause_s: float = 0.0) -> None:
        """All of a stream, held against what is known."""
        pieces: list[Piece] = []
        async with stream:
            async for piece in stream:
                pieces.append(piece)
                self._check_begin(known, pieces)
                if pause_s:
                    await asyncio.sleep(pause_s)
        if "".join(pieces) != stream.result.text:
            raise WrongAnswer(f"pieces {''.join(pieces)!r} are not the text {stream.result.text!r}")
        if tuple(_ids(pieces)) != stream.result.token_ids:
            raise WrongAnswer("the ids of the pieces are not those of the answer")
        self._finish(known, stream.result.token_ids)

    async def _take_back(self, session: Session, stream, known: dict) -> None:
        """Some pieces of the first request of a session, which then ends by its id."""
        request_id = self._last_ids[0]
        await self._some(stream, known)
        if session.cancel(request_id):
            # What came before the cancel is still there to be read.
            with contextlib.suppress(CallCancelledError):
                async for _ in stream:
                    pass

    async def _some(self, stream, known: dict) -> None:
        """Some pieces of a stream."""
        pieces: list[Piece] = []
        for _ in range(self._draw.randint(0, 12)):
            piece = await anext(stream, None)
            if piece is None:
                break
            pieces.append(piece)
        self._check_begin(known, pieces)

    def _check_begin(self, known: dict, pieces: Sequence[Piece]) -> None:
        ids = _ids(pieces)
        if ids != known["token_ids"][: len(ids)]:
            raise WrongAnswer(f"{ids} does not begin the known answer {known['token_ids']}")

    def _finish(self, known: dict, ids: Sequence[int]) -> None:
        if list(ids) != known["token_ids"]:
            raise WrongAnswer(f"{list(ids)} is not the known answer {known['token_ids']}")
        self.tally.finished += 1
        self.tally.tokens += len(ids)

    def _unhindered(self, known: dict, started_s: float) -> None:
        self.tally.unhindered_tokens += len(known["token_ids"])
        self.tally.unhindered_s += time.monotonic() - started_s


def _ids(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


# How often, and what.
BEHAVIOURS: dict[str, tuple[int, Callable[[Visitor], Awaitable[str]]]] = {
    "whole": (15, Visitor.whole),
    "streamed": (30, Visitor.streamed),
    "slow": (8, Visitor.slow),
    "cancelled": (15, Visitor.cancelled),
    "disconnected": (8, Visitor.disconnected),
    "half_closed": (6, Visitor.half_closed),
    "taken_back": (6, Visitor.taken_back),
    "hurried": (8, Visitor.hurried),
    "wrong": (4, Visitor.wrong),
}
