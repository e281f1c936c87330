# SPDX-License-Identifier: Apache-2.0
"""Checks of single values, made once and kept in tables: each says the value, the limit and the way out."""

import math
from collections.abc import Callable
from typing import Any

from metrale_jax.core.errors import RequestError, shown

# Beyond this no count or id means anything, and arrays cannot hold it.
MAX_INTEGER = 2**63 - 1
# Longer texts are no patterns, schemas or words; what compiles them says so at this length too.
MAX_TEXT = 1 << 16
# More ids or texts than any vocabulary has words are refused before each is looked at.
MAX_LISTED = 1 << 19
# (name, value) -> nothing, or `RequestError`.
Check = Callable[[str, Any], None]


def number(low: float, high: float, remedy: str, open_low: bool = False) -> Check:
    """A check for a finite number from `low` (not itself where `open_low`) to `high`."""
    wanted = f"a {'finite ' if high == math.inf else ''}number {_range(low, high, open_low)}"

    def check(name: str, value: Any) -> None:
        if not _is_finite(value) or value < low or value > high or (open_low and value == low):
            raise RequestError(f"{name}={shown(value)} is not {wanted}; {remedy}.", name)

    return check


def integer(low: int, high: float, remedy: str) -> Check:
    """A check for an integer from `low` to `high`, or where that is infinity to `MAX_INTEGER`."""
    most = MAX_INTEGER if high == math.inf else high

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or value > most:
            raise RequestError(f"{name}={shown(value)} is not an integer {_range(low, most, False)}; {remedy}.", name)

    return check


def text(least: int, remedy: str, most: int = MAX_TEXT) -> Check:
    """A check for a text of valid Unicode of `least` to `most` characters."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or len(value) < least:
            wanted = f"a text of at least {least} character{'' if least == 1 else 's'}" if least else "a text"
            raise RequestError(f"{name}={shown(value)} is not {wanted}; {remedy}.", name)
        if len(value) > most:
            raise RequestError(f"{name} of {len(value)} characters is over the limit of {most}; shorten it.", name)
        if not is_unicode(value):
            raise RequestError(
                f"{name}={shown(value)} has a lone surrogate, which no text can have; decode it with errors='replace' "
                "first.",
                name,
            )

    return check


def is_unicode(value: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_of(values: tuple, remedy: str) -> Check:
    """A check for one of `values`, of the same type as it."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            raise RequestError(f"{name}={shown(value)} is not one of {', '.join(map(repr, values))}; {remedy}.", name)

    return check


def optional(inner: Check) -> Check:
    """`inner`, with None let through."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            inner(name, value)

    return check


def every(inner: Check) -> Check:
    """`inner` for each value of a tuple."""

    def check(name: str, value: Any) -> None:
        for item in value:
            inner(name, item)

    return check


def in_turn(*checks: Check) -> Check:
    """All of `checks`."""

    def check(name: str, value: Any) -> None:
        for inner in checks:
            inner(name, value)

    return check


def listed(name: str, value: Any) -> tuple:
    """The list or tuple as a tuple, None as an empty one."""
    if value is not None and not isinstance(value, list | tuple):
        raise RequestError(f"{name}={shown(value)} is not a list; give a list, or leave it out.", name)
    if value is not None and len(value) > MAX_LISTED:
        raise RequestError(f"{name} of {len(value)} entries is over the limit of {MAX_LISTED}; name fewer.", name)
    return tuple(value or ())


def at_most(count: int, size: int) -> Check:
    """A check for a tuple of up to `count` texts or tuples, of up to `size` characters or ids together."""

    def check(name: str, value: Any) -> None:
        total = sum(map(len, value))
        if len(value) > count or total > size:
            raise RequestError(
                f"{name} of {len(value)} entries with {total} characters or ids is over the limit of {count} with "
                f"{size}; name fewer.",
                name,
            )

    return check


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _range(low: float, high: float, open_low: bool) -> str:
    start = f"above {low}" if open_low else f"from {low}"
    if high in (math.inf, MAX_INTEGER):
        return start if open_low else f"{start} up"
    return f"{start} to {high}"
