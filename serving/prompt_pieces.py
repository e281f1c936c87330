# SPDX-License-Identifier: Apache-2.0
"""What a body's prompt is made of, piece by piece as the model sees it: enough to tell that two begin alike."""

import json
from typing import Any

# The fields of each API that the prompt is made of, in the order in which chat templates put them.
PROMPTS = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/messages": ("tools", "system", "messages"),
    "/v1/responses": ("tools", "instructions", "input"),
}
SALT = "cache_salt"


def pieces_of(path: str, body: bytes) -> tuple[tuple[bytes, ...], str]:
    """The pieces of the body's prompt, the first of several, and the salt that it names ("" for none). There are no
    pieces where a path has no prompt, or where the body is not what its API takes: whoever answers will say so."""
    names = PROMPTS.get(path)
    if names is None:
        return (), ""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return (), ""
    if not isinstance(fields, dict):
        return (), ""
    salt = fields.get(SALT)
    pieces = tuple(piece for name in names for piece in _pieces(fields.get(name)))
    return pieces, salt if isinstance(salt, str) else ""


def _pieces(value: Any) -> tuple[bytes, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return tuple(map(_bytes, value))
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return (_bytes(value[0]),)
    return (_bytes(value),)


def _bytes(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
