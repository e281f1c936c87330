# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can meet.

Every message has three parts, one sentence each at most: the value, the limit it broke, and the way out.
Broken invariants of our own are `assert`s with a message, never one of these.
"""

from typing import Any

MAX_SHOWN = 200


def shown(value: Any, limit: int = MAX_SHOWN) -> str:
    """`repr(value)` for a message, cut at `limit` characters; the type alone where the value is too large to spell."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class MetraleError(ValueError):
    """Base of every error that a user's input can cause; the command line prints it on one line and exits 2.

    `field` names what is at fault where that is known: a field of `SamplingParams`, or "prompt".
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


class ConfigError(MetraleError):
    """A model or engine setting that is missing, unknown or out of range."""


class CheckpointError(MetraleError):
    """A checkpoint whose files or tensors are not what its config promises."""


class ModelNotFoundError(MetraleError):
    """A model name that is neither an alias, a path nor a reachable hub id."""


class RequestError(MetraleError):
    """A prompt or sampling parameter that cannot be served; other requests go on.

    `field` is the one of `SamplingParams` at fault, "prompt" or "messages"; empty where it is none of these.
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """A prompt that is as long as the context, or longer."""


class TextError(MetraleError):
    """A tokenizer or chat template that is missing or cannot be used."""


class Unsupported(MetraleError):
    """A kernel, architecture or rope type that was asked for by name and does not serve the case."""
