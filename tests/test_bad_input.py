# SPDX-License-Identifier: Apache-2.0
"""Odd checkpoints, as a stranger brings them: one line that names the fault and exit 2, never a traceback."""

import json
import shutil

import pytest

from metrale_jax import LLM, cli
from metrale_jax.core.errors import ConfigError
from metrale_jax.loading import read_config
from tests.conftest import GOLDENS


@pytest.fixture
def directory(tmp_path):
    """A sound checkpoint to spoil."""
    return shutil.copytree(GOLDENS / "llama-default", tmp_path / "model")


def refused(capsys, model, *options):
    status = cli.main(["inspect", "--model", str(model), *options])
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("metrale-jax: ")
    return captured.err


def replaced_by_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "no-such-model"], ids=["empty", "nul", "long", "unknown"])
def test_a_name_that_is_no_model_is_told_what_a_name_can_be(capsys, name):
    assert "Hub id of the form org/name" in refused(capsys, name)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("architectures", ["FooForCausalLM"], "FooForCausalLM"),
        ("architectures", "LlamaForCausalLM", "does not name one model class"),
        ("architectures", [{"a": 1}], "does not name one model class"),
        ("architectures", None, "model_type='llama'"),
        ("hidden_size", "64", "hidden_size='64'"),
        ("num_hidden_layers", 0, "num_hidden_layers=0"),
        ("head_dim", 0, "head_dim=0"),
        ("rope_parameters", [1], "rope_parameters=[1]"),
        ("rope_scaling", {"rope_type": "foo"}, "rope type 'foo'"),
        ("dtype", "int3", "dtype='int3'"),
        ("eos_token_id", {"a": 1}, "eos_token_id="),
        ("hidden_act", "foo", "hidden_act='foo'"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings='yes'"),
    ],
)
def test_a_config_field_that_makes_no_sense_is_named(capsys, directory, field, value, words):
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    assert words in refused(capsys, directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [-1, 10**9, True, [2, -1], [2, False], "2", 2.0], ids=str)
def test_a_stop_id_that_is_no_token_is_named_with_its_file(capsys, directory, name, value):
    path = directory / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
    told = refused(capsys, directory)
    assert f"eos_token_id={value!r} in {path} is not a token id" in told


def test_an_answer_ends_at_the_stop_ids_of_both_files(directory):
    for name, value in (("config.json", [5, 6]), ("generation_config.json", 7)):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
    assert read_config(directory)[1].token_ids("eos_token_id") == (5, 6, 7)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_directory_where_a_file_belongs_is_named(capsys, directory, name):
    replaced_by_directory(directory / name)
    assert f"{name} cannot be read" in refused(capsys, directory)


def test_a_directory_without_a_config_is_told_what_is_needed(capsys, directory):
    (directory / "config.json").unlink()
    assert "config.json does not exist" in refused(capsys, directory)


def test_weights_that_are_cut_short_or_empty_are_told(capsys, directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "it is cut short" in refused(capsys, directory)
    weights.write_bytes(b"")
    assert "(0 bytes) is not a safetensors file" in refused(capsys, directory)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"GGML" + bytes(64), "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16 + bytes(64), "cut short"),
    ],
)
def test_a_file_that_is_no_gguf_is_told(capsys, tmp_path, data, words):
    (tmp_path / "model.gguf").write_bytes(data)
    assert words in refused(capsys, tmp_path / "model.gguf")


@pytest.mark.parametrize("options", [("--dtype", "int3"), ("--block-size", "0"), ("--block-size", "24")], ids="-".join)
def test_an_option_of_no_use_is_named_with_its_value(capsys, directory, options):
    assert options[0].strip("-").replace("-", "_") + "=" in refused(capsys, directory, *options)


def test_a_tokenizer_that_cannot_be_read_leaves_the_model_described(capsys, directory):
    (directory / "tokenizer.json").write_bytes(b"\xff\xfe")
    assert cli.main(["inspect", "--model", str(directory)]) == 0
    assert "tokenizer.json cannot be read" in capsys.readouterr().out


def test_a_cache_too_small_for_one_request_is_told_the_least_size(directory):
    config = directory / "config.json"
    values = json.loads(config.read_text())
    with pytest.raises(ConfigError, match="kv_cache_mib=1 holds fewer than 3 blocks of .* give"):
        LLM(directory, kv_cache_mib=1, block_size=1 << 14, max_context_tokens=values["max_position_embeddings"])
