# SPDX-License-Identifier: Apache-2.0
"""`AsyncClient`: the service from coroutines."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import grpc

from serving.client import calls
from serving.client.calls import StreamCall, UnaryCall
from serving.client.connection import ClientTls, closed_error, connection, methods, task_is_cancelled
from serving.client.errors import error_of_call
from serving.client.prompts import PromptInput
from serving.client.results import Embedding, Generation, Model, Score, Tokens
from serving.client.retry import DEFAULT_RETRIES, NO_RETRIES, REAL_CLOCK, Clock, RetryPolicy
from serving.client.session import Session
from serving.client.streams import AsyncStream

T = TypeVar("T")


class AsyncClient:
    """As `Client`, for coroutines of one event loop, inside which it is made."""

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
        retries: RetryPolicy = DEFAULT_RETRIES,
        insecure_token: bool = False,
        clock: Clock = REAL_CLOCK,
    ):
        self._connection = connection(target, token, tls, timeout_s, retries, insecure_token, clock)
        self._channel = self._connection.aio_channel()
        self._methods = methods(self._channel)
        self._closed = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs and gives the connection back; later calls raise `CallCancelledError`."""
        self._closed = True
        await self._channel.close()

    async def generate(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> Generation:
        """As `Client.generate`."""
        return await self._unary(calls.generate(prompt, model, request_id, params), timeout_s)

    def stream(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncStream:
        """As `Client.stream`, for `async for`."""
        return self._stream(calls.stream(prompt, model, request_id, params), timeout_s)

    async def fork(
        self,
        prompt: PromptInput,
        branches: Sequence[Mapping[str, Any] | PromptInput],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> tuple[Generation, ...]:
        """As `Client.fork`."""
        async with self._stream(calls.fork(prompt, branches, model, request_id, params), timeout_s) as stream:
            async for _ in stream:
                pass
        return stream.result.choices

    def stream_fork(
        self,
        prompt: PromptInput,
        branches: Sequence[Mapping[str, Any] | PromptInput],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncStream:
        """As `Client.stream_fork`, for `async for`."""
        return self._stream(calls.fork(prompt, branches, model, request_id, params), timeout_s)

    async def score(
        self,
        prompt: PromptInput,
        continuations: Sequence[PromptInput] = (),
        *,
        num_top: int = 0,
        cache_salt: str = "",
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> tuple[Score, ...]:
        """As `Client.score`."""
        call = calls.score(prompt, continuations, num_top, cache_salt, model, request_id)
        return await self._unary(call, timeout_s)

    async def embed(
        self,
        inputs: Sequence[PromptInput],
        *,
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = True,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> tuple[Embedding, ...]:
        """As `Client.embed`."""
        return await self._unary(calls.embed(inputs, pooling, normalize, model, request_id), timeout_s)

    async def tokenize(self, prompt: PromptInput, *, model: str = "", timeout_s: float | None = None) -> Tokens:
        """As `Client.tokenize`."""
        return await self._unary(calls.tokenize(prompt, model), timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """As `Client.detokenize`."""
        return await self._unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """As `Client.models`."""
        return await self._unary(calls.models(), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> str:
        """As `Client.health`."""
        return await self._unary(calls.health(service), timeout_s, NO_RETRIES)

    def session(self) -> Session:
        """Many requests over one call."""
        if self._closed:
            raise closed_error()
        return Session(self._methods["GenerateStream"](metadata=self._connection.metadata), self._connection)

    async def _unary(self, call: UnaryCall[T], timeout_s: float | None, retries: RetryPolicy | None = None) -> T:
        attempts = self._connection.attempts(timeout_s, retries)
        while True:
            try:
                return call.read(await self._send(call, attempts.left_s()))
            except grpc.RpcError as error:
                wait_s = attempts.wait_s(error_of_call(error))
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise closed_error() from None
            await self._connection.clock.pause(wait_s)

    def _stream(self, call: StreamCall, timeout_s: float | None) -> AsyncStream:
        attempts = self._connection.attempts(timeout_s)
        return AsyncStream(lambda left_s: self._send(call, left_s), call.num_answers, attempts, self._connection.clock)

    def _send(self, call: UnaryCall | StreamCall, left_s: float | None) -> Any:
        if self._closed:
            raise closed_error()
        return self._methods[call.method](call.request, timeout=left_s, metadata=self._connection.metadata)
