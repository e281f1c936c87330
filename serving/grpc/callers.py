# SPDX-License-Identifier: Apache-2.0
"""What a gRPC call says beside its message: who calls, until when, under which trace and name."""

import re
import uuid
from dataclasses import replace

import grpc

from metrale_jax.core.errors import shown
from serving.core.api import AbstractService
from serving.core.calls import Caller, CallInfo
from serving.core.errors import Kind, ServiceError

TRACE_KEYS = ("traceparent", "tracestate", "baggage")
REQUEST_ID_KEY = "x-request-id"
# It goes back as metadata, and those are printable ASCII.
_REQUEST_ID = re.compile("[!-~]{1,128}")


def caller_of(service: AbstractService, context: grpc.aio.ServicerContext) -> Caller:
    """Who calls, by the key in `authorization` or `x-api-key`, and the trace that the call belongs to.

    Raises `ServiceError` for a key that the service does not know.
    """
    metadata = {key: value for key, value in reversed(context.invocation_metadata()) if isinstance(value, str)}
    caller = service.authenticate(_token(metadata), context.peer())
    trace = {key: metadata[key] for key in TRACE_KEYS if key in metadata}
    return replace(caller, trace=trace) if trace else caller


def call_info(
    context: grpc.aio.ServicerContext, method: str, model: str, request_id: str, field: str = "request_id"
) -> CallInfo:
    """What goes with a call; a fresh id where `request_id` is empty. `field` is where the message has it.

    Raises `ServiceError` for an id that metadata cannot carry.
    """
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        message = f"{field}={shown(request_id, 80)} is not 1 to 128 printable ASCII characters; use some, or none."
        raise ServiceError(Kind.INVALID, message, field=field)
    return CallInfo(
        model=model,
        request_id=request_id or uuid.uuid4().hex,
        method=method,
        timeout_s=context.time_remaining(),
    )


async def announce(context: grpc.aio.ServicerContext, request_id: str) -> None:
    """Sends the call's id ahead of its answer."""
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))


def _token(metadata: dict[str, str]) -> str | None:
    # Whatever else is in `authorization` may be a proxy's.
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    own = token.strip() if scheme.lower() == "bearer" else ""
    return own or metadata.get("x-api-key") or None
