# SPDX-License-Identifier: Apache-2.0
"""`ServiceError`s as HTTP statuses, headers and error objects, in the shapes of OpenAI and of Anthropic."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from serving.core.errors import Kind, ServiceError
from serving.http.schemas import ANTHROPIC_ERROR, OPENAI_ERROR, Schema

# No client is left to read it; it is for records.
CLIENT_GONE = 499
FIELD_HEAD = re.compile(r"([^.\[]*)(.*)", re.DOTALL)


class HttpFault(ServiceError):
    """A fault that only HTTP knows: a `status` of its own, and `headers` that belong to it."""

    def __init__(self, status: HTTPStatus, message: str, field: str = "", headers: Mapping[str, str] | None = None):
        kind = Kind.NOT_FOUND if status is HTTPStatus.NOT_FOUND else Kind.INVALID
        super().__init__(kind, message, field=field)
        self.status, self.headers = status, headers or {}


@dataclass(frozen=True)
class _Spelling:
    """How a kind is told: the status, OpenAI's `type` and `code`, Anthropic's `type`."""

    status: int
    openai: str
    code: str | None
    anthropic: str


SPELLINGS = MappingProxyType(
    {
        Kind.INVALID: _Spelling(400, "invalid_request_error", None, "invalid_request_error"),
        Kind.TOO_LONG: _Spelling(400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"),
        Kind.UNAUTHENTICATED: _Spelling(401, "authentication_error", "invalid_api_key", "authentication_error"),
        Kind.FORBIDDEN: _Spelling(403, "permission_error", "forbidden", "permission_error"),
        Kind.NOT_FOUND: _Spelling(404, "not_found_error", "not_found", "not_found_error"),
        Kind.CONFLICT: _Spelling(409, "conflict_error", "conflict", "api_error"),
        Kind.EXHAUSTED: _Spelling(429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
        Kind.TOO_LATE: _Spelling(408, "timeout_error", "timeout", "timeout_error"),
        Kind.CANCELLED: _Spelling(CLIENT_GONE, "cancelled_error", "cancelled", "api_error"),
        Kind.UNAVAILABLE: _Spelling(503, "service_unavailable_error", "service_unavailable", "overloaded_error"),
        Kind.INTERNAL: _Spelling(500, "server_error", "internal_error", "api_error"),
    }
)


def status_of(error: ServiceError) -> int:
    """The status that ends a call so."""
    return int(error.status) if isinstance(error, HttpFault) else SPELLINGS[error.kind].status


def headers_of(error: ServiceError) -> dict[str, str]:
    """The headers that go with it."""
    headers = dict(error.headers) if isinstance(error, HttpFault) else {}
    if error.kind is Kind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        # OpenAI's own clients look at this one first.
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    return headers


def renamed(error: ServiceError, names: Mapping[str, str]) -> ServiceError:
    """The error as one of a body that has `names` of its own for what the service calls otherwise."""
    ours = error.field.removeprefix("params.")
    theirs = names.get(ours, ours)
    if theirs == ours or isinstance(error, HttpFault):
        return error
    message = str(error)
    if message.startswith(f"{ours}="):
        message = theirs + message.removeprefix(ours)
    made = ServiceError(error.kind, message, field=theirs, retry_after_s=error.retry_after_s)
    made.recorded = error.recorded
    return made


@dataclass(frozen=True)
class ErrorForm:
    """How an API writes errors: `body(error, request_id)` is the object, `event(object)` what it is in a stream, and
    `schema` describes it."""

    body: Callable[[ServiceError, str], dict[str, Any]]
    event: Callable[[dict[str, Any]], bytes]
    schema: Schema


def openai_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """The error object of OpenAI."""
    spelling = SPELLINGS[error.kind]
    code = "model_not_found" if error.kind is Kind.NOT_FOUND and error.field == "model" else spelling.code
    param = error.field.removeprefix("params.") or None
    return {"error": {"message": str(error), "type": spelling.openai, "param": param, "code": code}}


def anthropic_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """The error object of Anthropic."""
    too_large = status_of(error) == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    kind = "request_too_large" if too_large else SPELLINGS[error.kind].anthropic
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


def spelt(value: Any) -> bytes:
    """The value as JSON."""
    # Texts that went through errors may quote halves of surrogate pairs.
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


OPENAI = ErrorForm(openai_body, lambda body: b"data: " + spelt(body) + b"\n\n", OPENAI_ERROR)
ANTHROPIC = ErrorForm(anthropic_body, lambda body: b"event: error\ndata: " + spelt(body) + b"\n\n", ANTHROPIC_ERROR)


def with_fields(names: Mapping[str, str]) -> ErrorForm:
    """OpenAI's form for an API whose bodies have `names` of their own for what the service calls otherwise."""

    def body(error: ServiceError, request_id: str) -> dict[str, Any]:
        told = openai_body(error, request_id)
        head, rest = FIELD_HEAD.match(error.field).groups()
        if head in names:
            told["error"]["param"] = names[head] + rest
        return told

    return ErrorForm(body, OPENAI.event, OPENAI.schema)
