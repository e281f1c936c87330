# SPDX-License-Identifier: Apache-2.0
"""Calling what others hang on the engine, which goes on whatever they raise."""

import logging
from collections.abc import Callable

from metrale_jax.engine.request import Request

LOG = logging.getLogger(__name__)
Hook = Callable[[Request], None]


def ignore(request: Request) -> None:
    """Nothing: the hook of an engine that nobody listens to."""


def in_turn(*hooks: Hook) -> Hook:
    """A hook that calls each of `hooks`, the later ones also where an earlier one raises."""
    if not hooks:
        return ignore
    first, rest = hooks[0], in_turn(*hooks[1:])

    def call(request: Request) -> None:
        try:
            first(request)
        finally:
            rest(request)

    return call


def told(hook: Hook, request: Request) -> bool:
    """Whether `hook(request)` went well; an exception is logged and goes no further."""
    try:
        hook(request)
    except Exception:
        LOG.warning("on_finish raised for request %d", request.request_id, exc_info=True)
        return False
    return True
