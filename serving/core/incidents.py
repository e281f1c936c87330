# SPDX-License-Identifier: Apache-2.0
"""What callers are told of errors that nobody foresaw; what happened goes to the log only."""

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from serving.core.errors import Kind, ServiceError

LOGGER = logging.getLogger(__name__)


def unforeseen(error: Exception, method: str) -> ServiceError:
    """What the caller of `method` is told of an error that nobody foresaw."""
    incident = uuid.uuid4().hex[:12]
    LOGGER.error("%s failed, incident %s", method, incident, exc_info=error)
    message = f"The server failed in a way that is its own fault; name incident {incident} to whoever runs it."
    return ServiceError(Kind.INTERNAL, message)


@contextmanager
def foreseen(method: str, *as_they_are: type[BaseException]) -> Iterator[None]:
    """Whatever is raised inside, comes out as a `ServiceError`; cancellation and `as_they_are` stay as they are."""
    try:
        yield
    except (ServiceError, asyncio.CancelledError, *as_they_are):
        raise
    except Exception as error:
        raise unforeseen(error, method) from error
