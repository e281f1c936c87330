# SPDX-License-Identifier: Apache-2.0
"""`ResponseStore`: responses that later ones may go on from, in memory and for as long as there is room."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from serving.chat.dialects.api import Messages
from serving.core.errors import Kind, ServiceError
from serving.http.errors import spelt

MIB = 2**20


@dataclass(frozen=True)
class Stored:
    """A response, the chat up to its end without instructions, and the items that it was made from."""

    response: dict[str, Any]
    messages: Messages
    items: list[dict[str, Any]] = field(default_factory=list)


class ResponseStore:
    """Each caller's own, by key: nobody finds another's. Who has more than `max_each` bytes loses the oldest of their
    own, and beyond `max_all` the oldest of all go."""

    def __init__(self, max_each: int = 16 * MIB, max_all: int = 128 * MIB):
        self._max_each, self._max_all = max_each, max_all
        self._stored: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def put(self, key_id: str, stored: Stored) -> None:
        """Keeps it, if there is room for it at all."""
        size = len(spelt([stored.response, stored.messages, stored.items]))
        if size > min(self._max_each, self._max_all):
            return
        self._stored[key_id, stored.response["id"]] = (stored, size)
        self._sizes[key_id] = self._sizes.get(key_id, 0) + size
        while self._sizes[key_id] > self._max_each:
            self._drop(next(place for place in self._stored if place[0] == key_id))
        while sum(self._sizes.values()) > self._max_all:
            self._drop(next(iter(self._stored)))

    def get(self, key_id: str, response_id: str, field: str = "response_id") -> Stored:
        """The caller's response of this id. Raises `ServiceError` (NOT_FOUND) where there is none."""
        found = self._stored.get((key_id, response_id))
        if found is None:
            raise _missing(response_id, field)
        return found[0]

    def delete(self, key_id: str, response_id: str) -> None:
        """Forgets it. Raises `ServiceError` (NOT_FOUND) where there is none."""
        if (key_id, response_id) not in self._stored:
            raise _missing(response_id, "response_id")
        self._drop((key_id, response_id))

    def _drop(self, place: tuple[str, str]) -> None:
        _, size = self._stored.pop(place)
        self._sizes[place[0]] -= size
        if not self._sizes[place[0]]:
            del self._sizes[place[0]]


def _missing(response_id: str, field: str) -> ServiceError:
    message = f"Response {response_id[:80]!r} is not kept here, or no longer; send its items as input."
    return ServiceError(Kind.NOT_FOUND, message, field=field)
