# SPDX-License-Identifier: Apache-2.0
"""A converted directory opens like any other, and one that is unfinished or untrue is refused by name."""

import json
import shutil

import jax
import numpy as np
import pytest

from metrale_jax import cli
from metrale_jax.convert import convert_model
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.run_options import RunOptions
from metrale_jax.runtime import load_model
from tests.conftest import GOLDENS


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "untied"
    assert convert_model(GOLDENS / "llama-untied-bias", directory) == "float32"
    return directory


def changed(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


def test_a_converted_model_has_the_params_and_the_config_it_was_made_from(converted):
    original, loaded = load_model(str(GOLDENS / "llama-untied-bias")), load_model(str(converted))
    assert loaded.config == original.config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(original.params)
    for array, expected in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(original.params), strict=True):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))


def test_every_family_converts(tmp_path):
    for name in ("gemma3", "phi3-longrope", "qwen2-window", "olmo2"):
        convert_model(GOLDENS / name, tmp_path / name)
        assert load_model(str(tmp_path / name)).config == load_model(str(GOLDENS / name)).config


def test_a_dtype_is_asked_for_and_read_back(tmp_path):
    assert convert_model(GOLDENS / "llama-default", tmp_path / "half", "bfloat16") == "bfloat16"
    loaded = load_model(str(tmp_path / "half"), RunOptions(dtype="bfloat16"))
    assert loaded.params.embed.dtype == "bfloat16" and loaded.config.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype='int3'"):
        convert_model(GOLDENS / "llama-default", tmp_path / "other", "int3")
    assert not (tmp_path / "other").exists()


def test_a_gguf_model_keeps_its_tokenizer_chat_template_and_stop_ids(tmp_path):
    directory = tmp_path / "smollm2"
    assert cli.main(["convert", "--model", "smollm2-135m", "--output", str(directory), "--quiet"]) == 0
    original, loaded = load_model("smollm2-135m"), load_model(str(directory))
    text = "Hello, 12 wörld! <|im_start|>user\n\tbye"
    assert loaded.tokenizer.encode(text) == original.tokenizer.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(messages) == original.tokenizer.apply_chat_template(messages)
    assert set(loaded.eos_token_ids) == set(original.eos_token_ids)
    np.testing.assert_array_equal(np.asarray(loaded.params.embed), np.asarray(original.params.embed))


def test_inspect_describes_a_converted_directory(converted, capsys):
    assert cli.main(["inspect", "--model", str(converted)]) == 0
    assert "head of its own" in capsys.readouterr().out


def test_a_directory_that_holds_something_is_not_written_to(converted, tmp_path):
    with pytest.raises(CheckpointError, match="is not empty"):
        convert_model(GOLDENS / "llama-default", converted)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert_model(GOLDENS / "llama-default", tmp_path / "file")


def test_an_unfinished_directory_is_told(converted, tmp_path):
    directory = changed(converted, tmp_path)
    (directory / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks metadata\.json"):
        load_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_model(str(directory))


def test_a_config_that_the_params_do_not_fit_is_told_with_both_shapes(converted, tmp_path):
    directory = changed(converted, tmp_path)
    values = json.loads((directory / "config.json").read_text())
    values["vocab_size"] += 8
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"embed is \[\d+, \d+\], expected"):
        load_model(str(directory))


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise CheckpointError("disk full")

    monkeypatch.setattr("metrale_jax.convert.save_params", full)
    with pytest.raises(CheckpointError, match="disk full"):
        convert_model(GOLDENS / "llama-default", tmp_path / "out")
    assert not (tmp_path / "out").exists()
