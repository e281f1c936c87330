# SPDX-License-Identifier: Apache-2.0
"""What an answer is made of, as it comes. Pieces that follow each other belong together."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thinks aloud, without its tags."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Call number `index` of this answer, from 0, of the tool `name`; `id` is what its result will refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """Nothing more comes of this call. Its arguments are whole unless the answer was cut off or the model erred."""

    index: int


Part = Content | Reasoning | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True)
class Call:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Whole:
    """An answer in one piece."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments are a JSON text, and not the beginning of one."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def whole(parts: list[Part]) -> Whole:
    """All `parts` of one answer put together."""
    begun = [part for part in parts if isinstance(part, CallBegun)]
    arguments = dict.fromkeys((part.index for part in begun), "")
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    return Whole(
        content="".join(part.text for part in parts if isinstance(part, Content)),
        reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls=tuple(Call(part.id, part.name, arguments[part.index]) for part in begun),
    )
