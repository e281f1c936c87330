# SPDX-License-Identifier: Apache-2.0
"""Lists that are told page by page, and what their queries may say."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.http.schemas import Schema, array, nullable, object_of, text

Item = TypeVar("Item")
WHOLE_NUMBER = re.compile(r"\d{1,9}")


def whole_number(name: str, given: Any, least: int, most: int) -> int:
    """The number that a text, or a number, says. Raises `ServiceError` for what is none within those bounds."""
    value = int(given) if isinstance(given, str) and WHOLE_NUMBER.fullmatch(given) else given
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        message = f"{name}={shown(given, 80)} is not an integer from {least} to {most}; give one."
        raise ServiceError(Kind.INVALID, message, field=name)
    return value


def known_query(query: Iterable[str], names: Sequence[str]) -> None:
    """Nothing. Raises `ServiceError` for what is none of those names."""
    for name in query:
        if name not in names:
            message = f"{shown(name, 80)} is no known part of this query; use {', '.join(names)}."
            raise ServiceError(Kind.INVALID, message, field=name[:80])


def page(
    found: Sequence[Item], key: Callable[[Item], str], tell: Callable[[Item], dict], after: str | None, limit: int
) -> dict[str, Any]:
    """The list object of OpenAI: up to `limit` of what comes after the one whose key is `after`. Raises `ServiceError`
    where that is not among them."""
    begin = 0
    if after:
        places: Mapping[str, int] = {key(one): place for place, one in enumerate(found)}
        if after not in places:
            message = f"after={shown(after, 80)} is not in this list; begin anew."
            raise ServiceError(Kind.INVALID, message, field="after")
        begin = places[after] + 1
    shown_ones = [tell(one) for one in found[begin : begin + limit]]
    ids = [one["id"] for one in shown_ones]
    return {
        "object": "list",
        "data": shown_ones,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": begin + limit < len(found),
    }


def page_of(item: Schema) -> dict[str, Any]:
    """What a page of such items is described as."""
    ids = nullable(text())
    told = {"object": text("list"), "data": array(item), "first_id": ids, "last_id": ids}
    return object_of({**told, "has_more": {"type": "boolean"}}, "object", "data", "has_more")


def one_of(name: str, given: Any, choices: Sequence[str]) -> str:
    """The choice. Raises `ServiceError` for what is none."""
    if not isinstance(given, str) or given not in choices:
        message = f"{name}={shown(given, 80)} is not one of {', '.join(choices)}; give one."
        raise ServiceError(Kind.INVALID, message, field=name)
    return given
