# SPDX-License-Identifier: Apache-2.0
"""`Client`: the service from threads."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import grpc

from serving.client import calls
from serving.client.calls import StreamCall, UnaryCall
from serving.client.connection import ClientTls, closed_error, connection, methods
from serving.client.errors import error_of_call
from serving.client.prompts import PromptInput
from serving.client.results import Embedding, Generation, Model, Score, Tokens
from serving.client.retry import DEFAULT_RETRIES, NO_RETRIES, REAL_CLOCK, Clock, RetryPolicy
from serving.client.streams import Stream

T = TypeVar("T")


class Client:
    """One connection to a server, for any number of threads and of streams. A context manager; `close` ends its calls.

    `target` is gRPC's ("localhost:50051"). A `token` goes with every call, and over an unencrypted connection only to
    this machine, unless `insecure_token`. `timeout_s` is for calls that name none; what a call needs for its retries
    is part of it. Methods raise `ClientError`; before anything is sent, `TypeError` and `ValueError`.

    Prompts are a text, token ids, the messages of a chat, `Text` or `Chat`; parameters have the names of
    `SamplingParams` (`max_tokens=None`: to the context's end). `model` may stay empty where one is served.
    """

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
        self._channel = self._connection.channel()
        self._methods = methods(self._channel)
        self._closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and gives the connection back; later calls raise `CallCancelledError`."""
        self._closed = True
        self._channel.close()

    def generate(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> Generation:
        """The whole answer; with n > 1 the first, which holds the others."""
        return self._unary(calls.generate(prompt, model, request_id, params), timeout_s)

    def stream(
        self,
        prompt: PromptInput,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> Stream:
        """The answer piece by piece; with n > 1 pieces of all answers, told apart by `index`."""
        return self._stream(calls.stream(prompt, model, request_id, params), timeout_s)

    def fork(
        self,
        prompt: PromptInput,
        branches: Sequence[Mapping[str, Any] | PromptInput],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **params: Any,
    ) -> tuple[Generation, ...]:
        """An answer for each of `branches`, whose prompt runs once. A branch is a mapping of the parameters in which it
        differs from `params`, and perhaps of a `continuation`, a text or token ids that it adds to the prompt."""
        with self._stream(calls.fork(prompt, branches, model, request_id, params), timeout_s) as stream:
            for _ in stream:
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
    ) -> Stream:
        """As `fork`, piece by piece: `index` is the branch's."""
        return self._stream(calls.fork(prompt, branches, model, request_id, params), timeout_s)

    def score(
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
        """Log-probabilities of each continuation's tokens after `prompt`, or of the prompt's own without continuations,
        with the `num_top` likeliest beside each."""
        call = calls.score(prompt, continuations, num_top, cache_salt, model, request_id)
        return self._unary(call, timeout_s)

    def embed(
        self,
        inputs: Sequence[PromptInput],
        *,
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = True,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> tuple[Embedding, ...]:
        """A vector for each input: the mean of its tokens' rows or the last one, of length one if `normalize`."""
        return self._unary(calls.embed(inputs, pooling, normalize, model, request_id), timeout_s)

    def tokenize(self, prompt: PromptInput, *, model: str = "", timeout_s: float | None = None) -> Tokens:
        """Token ids of a text or a chat, and their bytes."""
        return self._unary(calls.tokenize(prompt, model), timeout_s)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids."""
        return self._unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout_s)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models there are; none while one loads."""
        return self._unary(calls.models(), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> str:
        """Whether the server, or one service of it, is "SERVING", "NOT_SERVING" or "UNKNOWN". Is asked once."""
        return self._unary(calls.health(service), timeout_s, NO_RETRIES)

    def _unary(self, call: UnaryCall[T], timeout_s: float | None, retries: RetryPolicy | None = None) -> T:
        attempts = self._connection.attempts(timeout_s, retries)
        while True:
            try:
                return call.read(self._send(call, attempts.left_s()))
            except grpc.RpcError as error:
                wait_s = attempts.wait_s(error_of_call(error))
            self._connection.clock.sleep(wait_s)

    def _stream(self, call: StreamCall, timeout_s: float | None) -> Stream:
        attempts = self._connection.attempts(timeout_s)
        return Stream(lambda left_s: self._send(call, left_s), call.num_answers, attempts, self._connection.clock)

    def _send(self, call: UnaryCall | StreamCall, left_s: float | None) -> Any:
        if self._closed:
            raise closed_error()
        return self._methods[call.method](call.request, timeout=left_s, metadata=self._connection.metadata)
