# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed lengths that follow from a seed."""

import random
from dataclasses import dataclass

PROMPT_TOKENS = (16, 128)
ANSWER_TOKENS = (16, 64)


@dataclass(frozen=True)
class Ask:
    """A prompt's ids and how many tokens its answer has: none ends early."""

    prompt: list[int]
    max_tokens: int


def asks(seed: str, count: int, vocab_size: int) -> list[Ask]:
    """`count` requests; another seed shares no prefix with them."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
        made.append(Ask(prompt, draw.randint(*ANSWER_TOKENS)))
    return made
