# SPDX-License-Identifier: Apache-2.0
"""Prompts that the model makes up itself: it is given the beginning of a user's turn, and goes on as a user would.

A model that was tuned on conversations has learnt what is asked as well as what is answered (Magpie, Xu et al. 2024),
so its own questions are of all the things it is able to talk about, which no list of prompts is.
"""

from collections.abc import Callable
from pathlib import Path

from metrale_jax.core.errors import MetraleError
from metrale_jax.llm import LLM
from metrale_jax.training.answers import Asked, collect_answers

# Below 1 a small model's questions make more sense.
TEMPERATURE = 0.9
MOST_TOKENS = 96
LEAST_TOKENS = 4
# Some questions do not end, or are none: so many are asked for, for each that is wanted.
SPARE = 1.6
MARK = "question"


def user_turn(llm: LLM) -> list[int]:
    """Token ids of a conversation up to where its user begins to speak; none where the chat template does not let one
    see where that is."""
    try:
        message = [{"role": "user", "content": MARK}]
        text = llm.tokenizer.apply_chat_template(message, continue_final_message=True)
    except MetraleError:
        return []
    return llm.tokenizer.encode(text[: -len(MARK)], add_special_tokens=False) if text.endswith(MARK) else []


def made_up(llm: LLM, count: int, seed: int, path: Path, show: Callable[[int, int], None]) -> list[str]:
    """Up to `count` different questions in the order of their seeds; fewer where the model ends too few of those that
    it begins. `path` keeps them, and `show(done, total)` counts, as in `collect_answers`."""
    start = user_turn(llm)
    if not start:
        return []
    tries = [Asked(tuple(start), TEMPERATURE, seed + number) for number in range(round(count * SPARE))]
    found: dict[str, None] = {}
    for one in collect_answers(llm, tries, MOST_TOKENS, path, show):
        if LEAST_TOKENS <= len(one.answer) < MOST_TOKENS:
            text = llm.tokenizer.decode(one.answer).strip()
            if text:
                found[text] = None
    return list(found)[:count]
