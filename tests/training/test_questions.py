# SPDX-License-Identifier: Apache-2.0
"""Questions that a model makes up are what it says in the user's place, and only those that it ends."""

import json
from dataclasses import replace

import pytest

from metrale_jax.core.errors import TextError
from metrale_jax.progress import silent
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.training.prompts import built_in, spread
from metrale_jax.training.questions import MOST_TOKENS, TEMPERATURE, made_up, user_turn
from metrale_jax.training.train import train_drafter
from tests.training.conftest import ChatBytes
from tests.training.test_train import SMALL


@pytest.fixture(scope="module")
def llm(tiny):
    return tiny("llama-default", chat=True)


def test_questions_are_the_models_own_from_a_users_turn_on(llm, tmp_path):
    start = llm.tokenizer.encode("[")
    assert user_turn(llm) == start
    show = lambda *at: None  # noqa: E731
    found = made_up(llm, 6, 3, tmp_path / "questions.jsonl", show)
    params = [SamplingParams(temperature=TEMPERATURE, seed=3 + number, max_tokens=MOST_TOKENS) for number in range(10)]
    said = llm.generate([start] * 10, params)
    ended = [one for one in said if one.finish_reason == "stop" and len(one.token_ids) >= 4]
    assert 0 < len(ended) < 10, "the case is to have both"
    assert found == [llm.tokenizer.decode(one.token_ids) for one in ended][:6]
    assert made_up(llm, 6, 3, tmp_path / "questions.jsonl", show) == found


def test_a_template_that_hides_the_users_turn_gives_no_questions(llm, tmp_path, monkeypatch):
    class Refusing(ChatBytes):
        def apply_chat_template(self, messages, continue_final_message: bool = False) -> str:
            raise TextError("no user may speak first.")

    class Framing(ChatBytes):
        def apply_chat_template(self, messages, continue_final_message: bool = False) -> str:
            return super().apply_chat_template(messages)

    for kind in (Refusing, Framing):
        monkeypatch.setattr(llm, "loaded", replace(llm.loaded, tokenizer=kind(llm.loaded.config.vocab_size)))
        assert user_turn(llm) == [] and made_up(llm, 2, 0, tmp_path / "none.jsonl", lambda *at: None) == []
        assert not (tmp_path / "none.jsonl").exists()


def test_a_chat_models_drafter_learns_from_its_own_questions_and_some_built_in_ones(llm, tmp_path):
    options = replace(SMALL, answers=8, held_out=4, row_tokens=256, data=str(tmp_path / "data"))
    figures = train_drafter(llm, tmp_path / "out", options, silent, lambda line: None)
    assert figures["answers"] == {"learnt": 8, "held_out": 4}
    prompts = {}
    for name in ("answers", "held-out"):
        lines = (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()
        prompts[name] = [tuple(json.loads(line)["prompt"]) for line in lines]
        listed = {
            tuple(llm.tokenizer.encode(f"[{text}]"))
            for text, _ in zip(built_in(0, True, name != "answers"), range(9), strict=False)
        }
        own = [prompt for prompt in prompts[name] if prompt not in listed]
        assert len(own) >= len(prompts[name]) / 2 and len(own) < len(prompts[name])
    assert not set(prompts["answers"]) & set(prompts["held-out"])


def test_lists_are_spread_over_one_another():
    assert spread("abcdef", "xy") == list("axbcdyef")
    assert spread("", "xy") == ["x", "y"] and spread("ab", "") == ["a", "b"]
