# SPDX-License-Identifier: Apache-2.0
"""Prompts are many, differ, and are held out by their text alone; files of them are read or refused."""

from itertools import islice

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.training.prompts import built_in, prompts_of_file


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_built_in_prompts_differ_and_held_out_ones_are_never_learnt_from(chat):
    learnt = list(islice(built_in(0, chat), 1500))
    assert len(set(learnt)) == 1500
    assert learnt == list(islice(built_in(0, chat), 1500)) and learnt != list(islice(built_in(1, chat), 1500))
    held_out = {text for seed in range(4) for text in islice(built_in(seed, chat, held_out=True), 100)}
    assert len(held_out) > 200 and not held_out & set(learnt)
    assert not any("{" in text for text in (*learnt, *held_out))


def test_prompts_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('"one"\n{"prompt": "two"}\n')
    assert prompts_of_file(tmp_path / "a.txt") == prompts_of_file(tmp_path / "b.jsonl") == ["one", "two"]
    # As editors on Windows write files; a prompt that comes twice would be both learnt from and measured by.
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfone\r\n \r\ntwo\r\none")
    (tmp_path / "d.jsonl").write_text('"one\u2028more"\n', encoding="utf-8")
    assert prompts_of_file(tmp_path / "c.txt") == ["one", "two"]
    assert prompts_of_file(tmp_path / "d.jsonl") == ["one\u2028more"]


def test_faults_of_files_are_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts_of_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        prompts_of_file(tmp_path / "empty.txt")
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"text": 1}\n')
    with pytest.raises(ConfigError, match="line 2 of .* has no prompt"):
        prompts_of_file(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text('" "\n')
    with pytest.raises(ConfigError, match="line 1 of .* has no prompt"):
        prompts_of_file(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="line 1 of .* is not JSON"):
        prompts_of_file(tmp_path / "bad.jsonl")
