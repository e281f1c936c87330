# SPDX-License-Identifier: Apache-2.0
"""How dear the `multipleOf` of a schema is: an automaton of as many states as there are remainders, built at once.

The library bounds whatever else a grammar asks for, but not this.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any

_EMBEDDED_SCHEMA = re.compile(r"%json\s*")
_FEW_DIGITS = 20


def num_remainders(schemas: Iterator[Any]) -> int:
    """Remainders that all `multipleOf` of some JSON values have together, in the smallest decimal that any has."""
    values = list(_multiples(schemas))
    if any(value.adjusted() > _FEW_DIGITS or value.as_tuple().exponent < -_FEW_DIGITS for value in values):
        return 10**_FEW_DIGITS
    scale = max((-value.as_tuple().exponent for value in values), default=0)
    return lcm(*(int(value.scaleb(max(0, scale))) for value in values))


def embedded_schemas(lark: str) -> Iterator[Any]:
    """The JSON values that a Lark text holds behind `%json`, as far as they are JSON."""
    decoder = json.JSONDecoder()
    for found in _EMBEDDED_SCHEMA.finditer(lark):
        try:
            yield decoder.raw_decode(lark, found.end())[0]
        except (ValueError, RecursionError):
            continue  # the library says what is wrong with it


def _multiples(values: Iterator[Any]) -> Iterator[Decimal]:
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(multiple := value.get("multipleOf"), int | float) and not isinstance(multiple, bool):
                yield from _decimal(multiple)
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _decimal(value: float) -> Iterator[Decimal]:
    try:
        number = Decimal(repr(value)).normalize()
    except (InvalidOperation, ValueError):
        number = Decimal(10) ** (2 * _FEW_DIGITS)  # too many digits to be spelt
    if number.is_finite() and number > 0:
        yield number
