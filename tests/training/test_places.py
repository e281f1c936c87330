# SPDX-License-Identifier: Apache-2.0
"""A run touches nothing that is not its own: not a model's directory, not another model's data, not another run's."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.progress import silent
from metrale_jax.training.places import LOCK, OWNER, claimed, refuse_others, settle_owner
from metrale_jax.training.train import train_drafter
from tests.training.test_train import SMALL


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": ""},
        {"config.json": "{"},
        {"config.json": "[]"},
        {"model.safetensors": ""},
        {"model-00001-of-00002.safetensors": ""},
        {"config.json": '{"drafter": "mtp", "target": {}}', "other.safetensors": ""},
        {"config.json": '{"architectures": ["LlamaForCausalLMEagle3"]}', "model.safetensors": ""},
    ],
)
def test_a_model_or_a_drafter_from_elsewhere_is_not_replaced(files, tiny, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = replace(SMALL, data=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="holds a model or drafter from elsewhere .*give another directory"):
        train_drafter(tiny("llama-default"), tmp_path, options, silent, lambda line: None)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == files


def test_a_head_that_was_written_before_a_kill_may_be_replaced(tmp_path):
    refuse_others(tmp_path)
    (tmp_path / "config.json").write_text('{"drafter": "mtp", "target": {"family": "llama"}}')
    (tmp_path / "model.safetensors").write_text("")
    refuse_others(tmp_path)


def test_data_is_of_one_model_and_one_length_of_answers(tmp_path):
    owner = {"weights": "a", "answer_tokens": 8}
    settle_owner(tmp_path, owner, ["answers.jsonl"])
    (tmp_path / "answers.jsonl").write_text("")
    settle_owner(tmp_path, owner, ["answers.jsonl"])
    with pytest.raises(ConfigError, match=r"made with weights='a', here 'b'; give another data directory"):
        settle_owner(tmp_path, owner | {"weights": "b"}, ["answers.jsonl"])
    with pytest.raises(ConfigError, match=r"made with answer_tokens=8, here 9"):
        settle_owner(tmp_path, owner | {"answer_tokens": 9}, ["answers.jsonl"])
    (tmp_path / OWNER).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        settle_owner(tmp_path, owner, ["answers.jsonl"])
    (tmp_path / OWNER).unlink()
    with pytest.raises(ConfigError, match="does not say whose answers"):
        settle_owner(tmp_path, owner, ["answers.jsonl"])


def test_another_model_does_not_learn_from_this_ones_answers(tiny, tmp_path):
    options = replace(SMALL, data=str(tmp_path / "data"))
    train_drafter(tiny("llama-default"), tmp_path / "out", options, silent, lambda line: None)
    told = json.loads((tmp_path / "data" / OWNER).read_text())
    assert told["family"] == "llama" and told["answer_tokens"] == SMALL.answer_tokens
    with pytest.raises(ConfigError, match="holds what was made with family='llama', here "):
        train_drafter(tiny("mamba2-tied"), tmp_path / "other", options, silent, lambda line: None)
    with pytest.raises(ConfigError, match="made with answer_tokens=8, here 9"):
        longer = replace(options, answer_tokens=9)
        train_drafter(tiny("llama-default"), tmp_path / "longer", longer, silent, lambda line: None)


HOLDER = """
import sys
from pathlib import Path
from metrale_jax.training.places import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time_works_in_a_directory(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process trains in .*wait for its end"), claimed(tmp_path):
            pytest.fail("both were let in")
        other.stdin.close()
        assert other.wait() == 0
    with claimed(tmp_path, tmp_path):
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_rows_too_short_for_any_answer_are_told(tiny, tmp_path):
    options = replace(SMALL, row_tokens=16)
    with pytest.raises(ConfigError, match=r"row_tokens=16 cuts each text before its answer; give \d+ or more"):
        train_drafter(tiny("llama-default", chat=True), tmp_path, replace(options, prompts="built-in"), silent, print)


def test_what_a_run_left_when_it_was_killed_at_its_end_is_cleared(tmp_path, tiny):
    for place in ("data", "checkpoints"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rest").write_text("")
    (tmp_path / "training.json").write_text("{}")
    with pytest.raises(ConfigError, match="is finished"):
        train_drafter(tiny("llama-default"), tmp_path, SMALL, silent, print)
    assert [path.name for path in tmp_path.iterdir()] == ["training.json"]
