# SPDX-License-Identifier: Apache-2.0
"""`RequestStream`: many requests at a time on one call, each with its own end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from serving.core.errors import Kind, ServiceError
from serving.core.events import Ended, Event
from serving.grpc.statuses import foreseen


@dataclass(eq=False)
class _Running:
    events: AsyncIterator[Event]
    message_of: Callable[[Event], bytes | None]
    failure: Callable[[ServiceError], bytes]
    num_answers: int
    # Whether its task waits for an event, so that it must be cancelled; else its generator can simply be closed.
    pulling: bool = False
    taken_back: bool = False
    task: asyncio.Task | None = None


class RequestStream:
    """Runs requests and sends their messages through `write`, one message at a time and one event ahead each, so that
    a slow reader costs no memory. `close` ends all; it is called whatever happens."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], method: str, max_requests: int):
        self._write, self._method, self._max_requests = write, method, max_requests
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task] = set()
        self._turn = asyncio.Lock()

    async def send(self, message: bytes) -> None:
        """Sends what is nobody's answer, when it is its turn."""
        async with self._turn:
            await self._write(message)

    def check_room(self, request_id: str) -> None:
        """Raises `ServiceError` where a request of that id cannot be started."""
        if request_id in self._running:
            message = f"request_id={request_id!r} is running on this stream already; use another, or wait for its end."
            raise ServiceError(Kind.INVALID, message, field="request_id")
        if len(self._running) >= self._max_requests:
            message = (
                f"{self._max_requests} requests run on this stream, which is its limit; "
                "wait for one to end, or open another stream."
            )
            raise ServiceError(Kind.EXHAUSTED, message, retry_after_s=1.0)

    def start(
        self,
        request_id: str,
        events: AsyncIterator[Event],
        message_of: Callable[[Event], bytes | None],
        failure: Callable[[ServiceError], bytes],
        num_answers: int,
    ) -> None:
        """Runs a request that `check_room` let in: sends what `message_of` makes of its events, and `failure` of its
        error. Its id is free again when the last of its `num_answers` is on its way."""
        running = _Running(events, message_of, failure, num_answers)
        self._running[request_id] = running
        running.task = asyncio.create_task(self._run(request_id, running))
        self._tasks.add(running.task)
        running.task.add_done_callback(self._tasks.discard)

    async def take_back(self, request_id: str) -> None:
        """Ends a request, which then fails as cancelled; nothing where it has ended."""
        running = self._running.get(request_id)
        if running is None or running.taken_back:
            return
        running.taken_back = True
        if running.pulling:
            running.task.cancel()
        else:
            # It may be long in a write that nobody reads: what it holds in the engine is given back now.
            await running.events.aclose()

    async def finish(self) -> None:
        """Comes back when no request runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Ends all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, request_id: str, running: _Running) -> None:
        try:
            try:
                with foreseen(self._method):
                    async with aclosing(running.events):
                        await self._pump(request_id, running)
                if running.taken_back:
                    raise ServiceError(Kind.CANCELLED, "The request was taken back.")
            except ServiceError as error:
                self._free(request_id, running)
                await self.send(running.failure(error))
        except grpc.aio.BaseError:
            # The call is over; its handler hears of it by itself.
            return
        finally:
            self._free(request_id, running)

    async def _pump(self, request_id: str, running: _Running) -> None:
        events, answers_left = running.events, running.num_answers
        try:
            while not running.taken_back:
                running.pulling = True
                event = await anext(events, None)
                running.pulling = False
                if event is None:
                    return
                if isinstance(event, Ended):
                    answers_left -= 1
                    if not answers_left:
                        self._free(request_id, running)
                message = running.message_of(event)
                if message is not None:
                    await self.send(message)
        except asyncio.CancelledError:
            if not (running.taken_back and running.pulling):
                raise
            running.task.uncancel()

    def _free(self, request_id: str, running: _Running) -> None:
        if self._running.get(request_id) is running:
            del self._running[request_id]
