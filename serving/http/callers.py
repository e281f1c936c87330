# SPDX-License-Identifier: Apache-2.0
"""What an HTTP call says beside its body: who calls, until when, under which trace and name."""

import math
import re
import uuid
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Scope

from metrale_jax.core.errors import shown
from serving.core.api import AbstractService
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
REQUEST_ID_HEADER = "x-request-id"
# Seconds that the client will wait for the whole answer.
TIMEOUT_HEADER = "x-request-timeout"
# Anthropic's clients send it.
VERSION_HEADER = "anthropic-version"
# It goes back as a header, and into logs.
_REQUEST_ID = re.compile("[!-~]{1,128}")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")


def peer_of(scope: Scope) -> str:
    """The transport's address; "" where it has none."""
    if scope.get("client") is None:
        return ""
    host, port = scope["client"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def caller_of(service: AbstractService, headers: Headers, peer: str) -> Caller:
    """Who calls, by the key in `authorization` or `x-api-key`, and the trace that the call belongs to.

    Raises `ServiceError` for a key that the service does not know.
    """
    caller = service.authenticate(_token(headers), peer)
    trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    return replace(caller, trace=trace) if trace else caller


def check_request_id(headers: Headers) -> None:
    """Nothing. Raises `ServiceError` for an id that the caller gave and that cannot go back."""
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and not _REQUEST_ID.fullmatch(given):
        message = (
            f"{REQUEST_ID_HEADER}={shown(given, 80)} is not 1 to 128 printable ASCII characters; use some, or none."
        )
        raise ServiceError(Kind.INVALID, message, field=REQUEST_ID_HEADER)


def request_id_of(headers: Headers) -> str:
    """The id that the caller gave where it can go back, or else a fresh one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def timeout_of(headers: Headers) -> float | None:
    """Seconds that the caller will wait; None where it does not say. Raises `ServiceError` for what is no time."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    seconds = float(given) if _SECONDS.fullmatch(given) else math.nan
    if not seconds > 0:
        message = (
            f"{TIMEOUT_HEADER}={shown(given, 80)} is not a number of seconds above 0, in digits (0.5, 30); give one, "
            "or leave it out."
        )
        raise ServiceError(Kind.INVALID, message, field=TIMEOUT_HEADER)
    return seconds


def _token(headers: Headers) -> str | None:
    # Whatever else is in `authorization` may be a proxy's.
    scheme, _, token = headers.get("authorization", "").partition(" ")
    own = token.strip() if scheme.lower() == "bearer" else ""
    return own or headers.get("x-api-key") or None
