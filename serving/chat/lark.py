# SPDX-License-Identifier: Apache-2.0
"""Pieces of Lark as llguidance reads it."""

import json
from collections.abc import Mapping
from typing import Any

# As answers that are JSON as a whole: between tokens one space, or a line break and some indentation.
_OPTIONS = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}", "json_allow_general_unicode_escapes": True}


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """Exactly this text, within a pattern."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def word(text: str, special_tokens: Mapping[str, int]) -> str:
    """A word of the model's format: the special token of that text, or the text where there is none."""
    return f"<[{special_tokens[text]}]>" if text in special_tokens else literal(text)


def json_of(schema: Mapping[str, Any], strict: bool) -> str:
    """JSON that the schema holds for; what the library cannot enforce is refused if `strict`, and else passed over."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": not strict}}, ensure_ascii=False)


def either(names: list[str]) -> str:
    """One of these rules."""
    return " | ".join(names)
