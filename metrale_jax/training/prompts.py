# SPDX-License-Identifier: Apache-2.0
"""Prompts that make a model talk about many things in many forms, so that a drafter learns how it talks.

Built in are some millions, drawn by seed. One in `HELD_OUT_EVERY`, told by a hash of its text, is never trained on:
measurements draw from these.
"""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from metrale_jax.core.errors import ConfigError
from metrale_jax.training.prompt_parts import (
    FORMS,
    LANGUAGES,
    MOODS,
    PEOPLE,
    PLACES,
    ROLES,
    SENTENCES,
    STARTS,
    TASKS,
    THINGS,
)

HELD_OUT_EVERY = 16


def built_in(seed: int, chat: bool, held_out: bool = False) -> Iterator[str]:
    """Different prompts without end: questions and requests for a model that chats, openings of texts for one that
    does not. The held-out ones and the others have none in common, whatever their seeds."""
    draw, seen = random.Random(f"prompts/{seed}"), set()
    forms = FORMS if chat else STARTS
    while True:
        text = draw.choice(forms).format_map(_parts(draw))
        text = text[0].upper() + text[1:]
        if text not in seen and is_held_out(text) == held_out:
            seen.add(text)
            yield text


def is_held_out(text: str) -> bool:
    """Whether a prompt is kept from training."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def _parts(draw: random.Random) -> dict[str, object]:
    thing, other = draw.sample(THINGS, 2)
    place, elsewhere = draw.sample(PLACES, 2)
    low = draw.randint(2, 12)
    return {
        "thing": thing,
        "thing2": other,
        "place": place,
        "place2": elsewhere,
        "person": draw.choice(PEOPLE),
        "mood": draw.choice(MOODS),
        "role": draw.choice(ROLES),
        "task": draw.choice(TASKS),
        "language": draw.choice(LANGUAGES),
        "sentence": draw.choice(SENTENCES),
        "n": low,
        "m": low + draw.randint(5, 30),
        "a": draw.randint(10, 400),
        "b": draw.randint(10, 120),
    }


def spread(most: Sequence[str], some: Sequence[str]) -> list[str]:
    """Both lists as one, each in its order, the second at even distances in the first."""
    places = [
        (number / max(1, len(texts)), which, number)
        for which, texts in enumerate((most, some))
        for number in range(len(texts))
    ]
    return [(most, some)[which][number] for _, which, number in sorted(places)]


def prompts_of_file(path: Path) -> list[str]:
    """The different prompts of a file: of a .jsonl each line's string, or its field "prompt"; else each line that
    is not blank.

    Raises `ConfigError` for a file that cannot be read, or holds none.
    """
    try:
        # Not `splitlines`: JSON strings may hold other separators of lines than this one.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {str(path)!r} cannot be read ({error}); name a text or .jsonl file.") from None
    found = [
        _of_json(line, path, number) if path.suffix == ".jsonl" else line.removesuffix("\r")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"prompts {str(path)!r} holds no prompt; give one a line.")
    return list(dict.fromkeys(found))


def _of_json(line: str, path: Path, number: int) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"line {number} of {path} is not JSON ({error}); correct it.") from None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'line {number} of {path} has no prompt; give a string or {{"prompt": "..."}}.')
    return text
