# SPDX-License-Identifier: Apache-2.0
"""Answers and rows: what is collected is what the model says and computes, and a killed run goes on."""

import json

import ml_dtypes
import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError, MetraleError
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.training.answers import Asked, asked, collect_answers
from metrale_jax.training.features import DONE, read_rows, record_rows
from metrale_jax.training.pack import draft_vocabulary, expected_counts


def silent(done, total):
    """Shows nothing."""


QUESTIONS = [Asked((5 + number, 9, 3), 0.8 * (number % 2), number) for number in range(7)]


def test_answers_are_the_engines_and_a_cut_file_is_gone_on_with(tiny, tmp_path):
    llm, path = tiny("llama-default"), tmp_path / "answers.jsonl"
    whole = collect_answers(llm, QUESTIONS, 6, path, silent)
    for one, question in zip(whole, QUESTIONS, strict=True):
        params = SamplingParams(temperature=question.temperature, seed=question.seed, max_tokens=6)
        assert one.prompt == question.tokens
        assert one.answer == llm.generate([question.tokens], params)[0].token_ids
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    seen = []
    assert collect_answers(llm, QUESTIONS, 6, path, lambda done, total: seen.append(done)) == whole
    assert seen == [3, 4, 5, 6, 7] and len(path.read_bytes().splitlines()) == 7
    with pytest.raises(ConfigError, match="answers to other prompts"):
        collect_answers(llm, [Asked((1, 2), 0.0, 0)] * 7, 6, path, silent)
    path.write_text('{"number": 0}\n')
    with pytest.raises(MetraleError, match="is damaged"):
        collect_answers(llm, QUESTIONS, 6, path, silent)


def test_a_prompt_without_room_for_an_answer_is_told(tiny):
    llm = tiny("llama-default", chat=True)
    limit = llm.engine.limits.max_context_tokens
    with pytest.raises(ConfigError, match=rf"prompt 2, 'x+\.\.\., does not fit .* may have {limit} tokens"):
        asked(llm, ["short", "x" * limit], 0)


@pytest.mark.parametrize("name", ["llama-default", "bamba"])
def test_rows_are_what_the_model_computes_for_each_text_alone(name, tiny, tmp_path):
    llm = tiny(name)
    config = llm.loaded.config
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, config.vocab_size, size).tolist() for size in (5, 90, 8, 7, 5, 8, 6, 8, 7, 6)]
    total = sum(map(len, texts))
    record_rows(llm.loaded.steps, llm.loaded.params, texts, (0, 1), tmp_path, silent)
    hidden, first, second = read_rows(tmp_path, (None, 0, 1), total, config.hidden_dim)
    embed = np.asarray(llm.loaded.params.embed)
    head = embed if isinstance(llm.loaded.params.head, tuple) else np.asarray(llm.loaded.params.head)
    start = 0
    for text in texts:
        rows = slice(start, start + len(text))
        # Logits come by another step of its own: one text, another cut.
        expected = llm.logits(text)
        got = np.asarray(hidden[rows], np.float32) @ head.T
        np.testing.assert_allclose(got, expected, atol=0.01 * np.abs(expected).max())
        np.testing.assert_array_equal(first[rows], embed[text].astype(ml_dtypes.bfloat16))
        assert not np.array_equal(first[rows], second[rows])
        start += len(text)


def test_rows_go_on_after_a_kill_and_with_further_texts(tiny, tmp_path):
    llm = tiny("llama-default")
    steps, params = llm.loaded.steps, llm.loaded.params
    texts = [[3 + number, 7, 9, 4] for number in range(20)]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    record_rows(steps, params, texts, (1,), tmp_path / "whole", silent)

    def stopping(done, total):
        if done > 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_rows(steps, params, texts[:18], (1,), tmp_path / "cut", stopping)
    seen = []
    before = steps.num_compiles
    record_rows(steps, params, texts, (1,), tmp_path / "cut", lambda done, total: seen.append(done))
    assert steps.num_compiles == before and seen == [32, 64, 80]
    width = llm.loaded.config.hidden_dim
    whole, again = (read_rows(tmp_path / name, (None, 1), 80, width) for name in ("whole", "cut"))
    for array, expected in zip(again, whole, strict=True):
        np.testing.assert_array_equal(array, expected)
    # Of other texts nothing is kept.
    record_rows(steps, params, [[9, 9]] * 2, (), tmp_path / "cut", silent)
    assert json.loads((tmp_path / "cut" / DONE).read_text())["files"] == {"hidden.rows": 4}


def test_a_draft_vocabulary_has_what_is_likely_and_what_must_be_there():
    hidden = np.eye(4, dtype=np.float16)
    scores = np.asarray([[0.0, 5, 0, 0, 4, 0]] * 4, np.float32)
    counts = expected_counts(hidden, lambda rows: scores[: len(rows)])
    np.testing.assert_allclose(counts.sum(), 4, rtol=1e-6)
    assert draft_vocabulary(counts, 3, (5,)).tolist() == [1, 4, 5]
    assert draft_vocabulary(np.zeros(6), 3, ()).tolist() == [0, 1, 2]
