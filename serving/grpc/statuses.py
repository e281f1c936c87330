# SPDX-License-Identifier: Apache-2.0
"""`ServiceError`s as gRPC statuses with google.rpc details."""

from contextlib import AbstractContextManager
from types import MappingProxyType

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.core import incidents
from serving.core.errors import Kind, ServiceError

DOMAIN = "metrale.jax"
# A status travels twice in HTTP/2 trailers, percent-encoded and in base64, and those are capped at 8 KiB.
MAX_MESSAGE_BYTES = 900

CODES = MappingProxyType(
    {
        Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
        Kind.TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
        Kind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
        Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
        Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        Kind.CONFLICT: grpc.StatusCode.ABORTED,
        Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Kind.TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
        Kind.CANCELLED: grpc.StatusCode.CANCELLED,
        Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
        Kind.INTERNAL: grpc.StatusCode.INTERNAL,
    }
)


def code_number(kind: Kind) -> int:
    """The kind as a number of google.rpc.Code."""
    return CODES[kind].value[0]


def short_message(error: ServiceError) -> str:
    """The error's message, cut where trailers could not carry it."""
    text = str(error)
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."


def status_of(error: ServiceError) -> grpc.Status:
    """What ends a call: code, message, and as details an ErrorInfo, the BadRequest's field and when to come again."""
    message = short_message(error)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.kind.name, domain=DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        details.append(retry)
    status = status_pb2.Status(code=code_number(error.kind), message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


def foreseen(method: str) -> AbstractContextManager[None]:
    """A context out of which every error comes as a `ServiceError`; cancellation and gRPC's own stay as they are."""
    return incidents.foreseen(method, grpc.aio.BaseError)
