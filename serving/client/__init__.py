# SPDX-License-Identifier: Apache-2.0
"""A Python client of the gRPC service, sync and async. Needs grpcio and protobuf only: no JAX, no model.

with Client("localhost:50051") as client:
    print(client.generate("Once upon a time", max_tokens=32).text)

`calls`, `params`, `prompts`, `reading`, `retry` and `errors` do no I/O and serve both; `client`, `aio`, `streams` and
`session` do. May import nothing of ours but the stubs.
"""

from serving.client.aio import AsyncClient
from serving.client.client import Client
from serving.client.connection import ClientTls
from serving.client.errors import (
    CallCancelledError,
    ClientError,
    DeadlineError,
    ExhaustedError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from serving.client.prompts import Chat, Text
from serving.client.results import (
    Embedding,
    Generation,
    Model,
    Piece,
    Score,
    Timings,
    TokenLogprob,
    Tokens,
    TopLogprob,
    Usage,
)
from serving.client.retry import Clock, RetryPolicy
from serving.client.session import Session
from serving.client.streams import AsyncStream, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CallCancelledError",
    "Chat",
    "Client",
    "ClientError",
    "ClientTls",
    "Clock",
    "DeadlineError",
    "Embedding",
    "ExhaustedError",
    "ForbiddenError",
    "Generation",
    "InvalidRequestError",
    "Model",
    "NotFoundError",
    "Piece",
    "RetryPolicy",
    "Score",
    "ServerError",
    "Session",
    "Stream",
    "Text",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
