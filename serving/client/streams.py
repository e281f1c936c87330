# SPDX-License-Identifier: Apache-2.0
"""`Stream` and `AsyncStream`: an answer piece by piece, tried again while nothing of it has come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from serving.client.connection import closed_error, task_is_cancelled
from serving.client.errors import ClientError, error_of_call
from serving.client.reading import AnswerReader, joined
from serving.client.results import Generation, Piece
from serving.client.retry import Attempts, Clock


class Stream:
    """Iterates over `Piece`s. A context manager whose end cancels what still runs; so does `close`, from any thread.

    Raises `ClientError`. A stream is read by one thread at a time.
    """

    def __init__(self, start: Callable[[float | None], Any], num_answers: int, attempts: Attempts, clock: Clock):
        self._start, self._attempts, self._clock = start, attempts, clock
        self._reader = AnswerReader(num_answers)
        self._closed = False
        self._call = start(attempts.left_s())

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        while not self._closed:
            try:
                return self._reader.take(next(self._call))
            except StopIteration:
                self._reader.results()
                raise
            except grpc.RpcError as error:
                if self._closed:
                    break
                wait_s = self._attempts.wait_s(error_of_call(error), delivered=self._reader.delivered)
            self._clock.sleep(wait_s)
            self._call = self._start(self._attempts.left_s())
        raise StopIteration

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration, and what still runs on the server."""
        self._closed = True
        self._call.cancel()

    @property
    def request_id(self) -> str:
        """The request's id, once a piece has come."""
        return self._reader.request_id

    @property
    def result(self) -> Generation | None:
        """The answer (the first of n, with the others in it), None before all have ended."""
        return joined(self._reader.results()) if self._reader.complete else None


class Responses(Protocol):
    """A try of an `AsyncStream`: a call of grpc.aio, or a request of a session."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The responses as they come."""

    def cancel(self) -> bool:
        """Ends it."""


class AsyncStream:
    """As `Stream`, for coroutines: `async for`, `async with`; `close` is no coroutine. Belongs to one event loop."""

    def __init__(self, start: Callable[[float | None], Responses], num_answers: int, attempts: Attempts, clock: Clock):
        self._start, self._attempts, self._clock = start, attempts, clock
        self._reader = AnswerReader(num_answers)
        self._closed = False
        self._call: Responses | None = None
        self._call = start(attempts.left_s())
        self._responses = aiter(self._call)

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        while not self._closed:
            try:
                return self._reader.take(await anext(self._responses))
            except StopAsyncIteration:
                self._reader.results()
                raise
            except grpc.RpcError as error:
                failed = error_of_call(error)
            except ClientError as error:
                failed = error
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                failed = closed_error()
            if self._closed:
                break
            wait_s = self._attempts.wait_s(failed, delivered=self._reader.delivered)
            await self._clock.pause(wait_s)
            self._call = self._start(self._attempts.left_s())
            self._responses = aiter(self._call)
        raise StopAsyncIteration

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *exception) -> None:
        self.close()

    def __del__(self):
        # A call of grpc.aio that is being read refers to itself: forgotten, it would go on until the collector comes.
        if self._call is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.close()

    def close(self) -> None:
        """Ends the iteration, and what still runs on the server."""
        self._closed = True
        self._call.cancel()

    @property
    def request_id(self) -> str:
        """The request's id, once a piece has come."""
        return self._reader.request_id

    @property
    def result(self) -> Generation | None:
        """The answer (the first of n, with the others in it), None before all have ended."""
        return joined(self._reader.results()) if self._reader.complete else None
