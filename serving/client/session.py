# SPDX-License-Identifier: Apache-2.0
"""`Session`: many requests over one bidirectional call, told apart and cancelled by their ids."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import grpc.aio

from serving.client import calls
from serving.client.connection import Connection, closed_error, task_is_cancelled
from serving.client.errors import (
    CallCancelledError,
    ClientError,
    DeadlineError,
    ServerError,
    error_of_call,
    error_of_failure,
)
from serving.client.prompts import PromptInput
from serving.client.results import Generation
from serving.client.streams import AsyncStream
from serving.grpc.stubs import generate_pb2 as pb


class Session:
    """Requests over one call of an `AsyncClient`. An async context manager; its end cancels what runs.

    Where a request fails, the others go on; where the call fails, all that run raise its error and later ones too.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, connection: Connection):
        self._call, self._connection = call, connection
        self._requests: dict[str, _Request] = {}
        self._outgoing: asyncio.Queue[pb.GenerateStreamRequest | None] = asyncio.Queue()
        self._error: ClientError | None = None
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    def stream(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncStream:
        """As `AsyncClient.stream`. Raises `ValueError` for the id of a request that runs."""
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r} is of a request that runs; use another, or none.")
        request = calls.generate_request(prompt, model, request_id, params)
        attempts = self._connection.attempts(timeout_s)
        num_answers = calls.num_answers(request.params)
        return AsyncStream(
            lambda left_s: self._start(request, num_answers, left_s), num_answers, attempts, self._connection.clock
        )

    async def generate(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> Generation:
        """As `AsyncClient.generate`."""
        async with self.stream(prompt, model=model, request_id=request_id, timeout_s=timeout_s, **params) as stream:
            async for _ in stream:
                pass
        return stream.result

    def cancel(self, request_id: str) -> bool:
        """Ends a request, whose stream raises `CallCancelledError`; False where none of this id runs."""
        request = self._requests.get(request_id)
        return request is not None and request.cancel()

    async def finish(self) -> None:
        """Closes the sending half: no request can follow, and it comes back when those that run have ended."""
        self._error = self._error or closed_error()
        self._outgoing.put_nowait(None)
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Cancels what runs and ends the call."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(closed_error())

    def _start(self, request: pb.GenerateRequest, num_answers: int, left_s: float | None) -> "_Request":
        if self._error is not None:
            raise self._error
        sent = pb.GenerateRequest()
        sent.CopyFrom(request)
        sent.request_id = request.request_id or uuid.uuid4().hex
        if left_s is not None:
            asked_s = sent.params.deadline_s if sent.params.HasField("deadline_s") else left_s
            # Zero is no deadline; the wait for it ends here as soon.
            sent.params.deadline_s = max(min(asked_s, left_s), 1e-3)
        made = _Request(sent.request_id, num_answers, left_s, self._drop)
        self._requests[made.request_id] = made
        self._outgoing.put_nowait(pb.GenerateStreamRequest(generate=sent))
        return made

    def _drop(self, request_id: str, cancel: bool) -> None:
        if self._requests.pop(request_id, None) is not None and cancel:
            self._outgoing.put_nowait(pb.GenerateStreamRequest(cancel=pb.CancelRequest(request_id=request_id)))

    async def _write(self) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the call has ended; the reading half tells all that wait
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise

    async def _read(self) -> None:
        try:
            async for response in self._call:
                # What was cancelled here may still have pieces on the way.
                if request := self._requests.get(response.request_id):
                    request.take(response)
        except grpc.RpcError as error:
            self._end(error_of_call(error))
        except asyncio.CancelledError:
            self._end(closed_error())
            if task_is_cancelled():
                raise
        else:
            self._end(ServerError("INTERNAL", "the session ended before its requests; ask again."))

    def _end(self, error: ClientError) -> None:
        self._error = self._error or error
        for request in tuple(self._requests.values()):
            request.fail(error)


class _Request:
    """The responses of one request, in the order in which they came: an async iterator."""

    def __init__(self, request_id: str, num_answers: int, timeout_s: float | None, drop: Callable[[str, bool], None]):
        self.request_id = request_id
        self._num_left, self._drop = num_answers, drop
        self._responses: asyncio.Queue[pb.GenerateStreamResponse | ClientError | None] = asyncio.Queue()
        self._ends_at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def __aiter__(self) -> "_Request":
        return self

    async def __anext__(self) -> pb.GenerateStreamResponse:
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                response = await self._responses.get()
        except TimeoutError:
            self._drop(self.request_id, True)
            raise DeadlineError("DEADLINE_EXCEEDED", "the server has not answered within the call's time.") from None
        except asyncio.CancelledError:
            self._drop(self.request_id, True)
            raise
        if response is None:
            raise StopAsyncIteration
        if isinstance(response, ClientError):
            raise response
        return response

    def take(self, response: pb.GenerateStreamResponse) -> None:
        event = response.WhichOneof("event")
        if event == "failed":
            self.fail(error_of_failure(response.failed))
            return
        self._responses.put_nowait(response)
        self._num_left -= event == "done"
        if not self._num_left:
            self._end(None, cancel=False)

    def fail(self, error: ClientError) -> None:
        self._end(error, cancel=False)

    def cancel(self) -> bool:
        self._end(CallCancelledError("CANCELLED", "the request was cancelled; send it again."), cancel=True)
        return True

    def _end(self, error: ClientError | None, cancel: bool) -> None:
        self._responses.put_nowait(error)
        self._drop(self.request_id, cancel)
