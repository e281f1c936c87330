# SPDX-License-Identifier: Apache-2.0
"""`ClientError` and its kinds: what the server, or the way to it, said in the place of an answer."""

from collections.abc import Mapping
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.grpc.stubs import generate_pb2 as pb


class ClientError(Exception):
    """A call that gave no answer: the `code` is gRPC's name ("UNAVAILABLE"), the `message` the server's own words.

    From the details that came along: the `field` at fault, "" where none is; `retry_after_s`, None where none is named;
    a `reason` for programs, "" where none is given.
    """

    def __init__(
        self, code: str, message: str, *, field: str = "", retry_after_s: float | None = None, reason: str = ""
    ):
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.field = code, message, field
        self.retry_after_s, self.reason = retry_after_s, reason

    def __reduce__(self):
        return _restored, (type(self), dict(vars(self)))


class InvalidRequestError(ClientError):
    """The request itself is wrong; `field` says where."""


class UnauthenticatedError(ClientError):
    """No token, or an unknown one."""


class ForbiddenError(ClientError):
    """The token may not do this."""


class NotFoundError(ClientError):
    """No such model, or no such service."""


class ExhaustedError(ClientError):
    """A limit of the token or of the server; `retry_after_s` says when to come again."""


class DeadlineError(ClientError):
    """The time that the call was given is over."""


class CallCancelledError(ClientError):
    """The call was taken back: by its maker, by the closing of the client, or by the server."""


class UnavailableError(ClientError):
    """No server there, or one that loads, drains or has lost its engine."""


class ServerError(ClientError):
    """The server failed, or what came from it is not of this protocol."""


KINDS: Mapping[str, type[ClientError]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": InvalidRequestError,
        "OUT_OF_RANGE": InvalidRequestError,
        "FAILED_PRECONDITION": InvalidRequestError,
        "UNAUTHENTICATED": UnauthenticatedError,
        "PERMISSION_DENIED": ForbiddenError,
        "NOT_FOUND": NotFoundError,
        "RESOURCE_EXHAUSTED": ExhaustedError,
        "DEADLINE_EXCEEDED": DeadlineError,
        "CANCELLED": CallCancelledError,
        "UNAVAILABLE": UnavailableError,
    }
)
CODES = MappingProxyType({code.value[0]: code.name for code in grpc.StatusCode})


def client_error(code: str, message: str, **details) -> ClientError:
    """The error of this code; one without a kind of its own is the server's."""
    return KINDS.get(code, ServerError)(code, message, **details)


def error_of_call(error: grpc.RpcError) -> ClientError:
    """What a call that ended with `error` (sync or aio) tells, with the details that its trailers carry."""
    found = {}
    for detail in _details(error):
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            violations = _unpacked(detail, error_details_pb2.BadRequest).field_violations
            found["field"] = violations[0].field if violations else ""
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = _unpacked(detail, error_details_pb2.RetryInfo).retry_delay
            found["retry_after_s"] = delay.seconds + delay.nanos / 1e9
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            found["reason"] = _unpacked(detail, error_details_pb2.ErrorInfo).reason
    return client_error(error.code().name, error.details() or "", **found)


def error_of_failure(failure: pb.Failure) -> ClientError:
    """What ended one request of a session."""
    after_s = failure.retry_after_s if failure.HasField("retry_after_s") else None
    code = CODES.get(failure.code, "UNKNOWN")
    return client_error(code, failure.message, field=failure.field, retry_after_s=after_s)


def _details(error: grpc.RpcError):
    try:
        status: status_pb2.Status | None = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        return ()  # a proxy has put its own code over the server's details
    return status.details if status is not None else ()


def _unpacked(detail, kind):
    message = kind()
    detail.Unpack(message)
    return message


def _restored(kind: type[ClientError], state: dict) -> ClientError:
    # Exceptions cross processes by their positional arguments alone, unless told otherwise.
    return kind(state.pop("code"), state.pop("message"), **state)
