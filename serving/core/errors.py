# SPDX-License-Identifier: Apache-2.0
"""`ServiceError`: what a caller is told in the place of an answer, free of any protocol."""

from enum import Enum

from metrale_jax.core.errors import MetraleError


class Kind(Enum):
    """Why a call was not served. Each front has a table from these to its own codes."""

    INVALID = "invalid"  # the call itself is wrong; `field` says where
    TOO_LONG = "too_long"  # the prompt is as long as the model's context, or longer
    UNAUTHENTICATED = "unauthenticated"  # no key, or an unknown one
    FORBIDDEN = "forbidden"  # the key may not do this
    NOT_FOUND = "not_found"  # no such model
    CONFLICT = "conflict"  # what is under way has to end first
    EXHAUSTED = "exhausted"  # a limit of the key or of the server; `retry_after_s` says when to come again
    TOO_LATE = "too_late"  # the deadline passed
    CANCELLED = "cancelled"  # the caller took it back
    UNAVAILABLE = "unavailable"  # loading, draining, or the engine is gone; another server may do
    INTERNAL = "internal"  # ours


class ServiceError(MetraleError):
    """A call that is not served: `kind`; the `field` at fault, "" where none is; seconds until a retry can succeed,
    None where none can be named. The message is fit for the caller's eyes: no stack trace, nothing of other callers.
    `recorded` says that the call it ended has left its record."""

    def __init__(self, kind: Kind, message: str, *, field: str = "", retry_after_s: float | None = None):
        super().__init__(message, field)
        self.kind, self.retry_after_s = kind, retry_after_s
        self.recorded = False
