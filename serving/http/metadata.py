# SPDX-License-Identifier: Apache-2.0
"""`metadata_of`: the caller's own notes on what is kept for it, bounded as OpenAI bounds them."""

from collections.abc import Mapping
from typing import Any

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.http.schemas import Schema, nullable, text

MAX_PAIRS, MAX_KEY_LEN, MAX_VALUE_LEN = 16, 64, 512
METADATA: Schema = nullable({"type": "object", "maxProperties": MAX_PAIRS, "additionalProperties": text()})


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, str] | None:
    """What the body has; None without it. Raises `ServiceError` (INVALID) for what is too much or no texts by name."""
    given = body.get("metadata")
    if given is None:
        return None
    fits = isinstance(given, dict) and len(given) <= MAX_PAIRS
    if not fits or not all(
        isinstance(value, str) and len(name) <= MAX_KEY_LEN and len(value) <= MAX_VALUE_LEN
        for name, value in given.items()
    ):
        message = (
            f"metadata={shown(given, 80)} is no object of up to {MAX_PAIRS} texts of {MAX_VALUE_LEN} characters, named "
            f"by up to {MAX_KEY_LEN}; give one, or none."
        )
        raise ServiceError(Kind.INVALID, message, field="metadata")
    return given
