# SPDX-License-Identifier: Apache-2.0
"""Multi-token predictors: what transformers' layers draft, from a model's own checkpoint, and answers unchanged."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.drafters import load_drafter, opened_proposer
from metrale_jax.loading import open_checkpoint
from metrale_jax.speculative.drafter_files import write_drafter
from metrale_jax.speculative.mtp import Mtp
from tests.conftest import GOLDENS
from tests.sometimes import mostly_slow
from tests.speculative.head_problems import drafter_after, head_of, random_params
from tests.speculative.solo_problems import assert_solo


def opened(path, cache, drafter=None):
    """The proposer of the checkpoint in `path`, and its weights."""
    checkpoint = open_checkpoint(path)
    found = opened_proposer("mtp", drafter, None, checkpoint, None, cache)
    return found, load_drafter(found, checkpoint, np.dtype(np.float32), lambda array, spec: jnp.asarray(array))


def with_next_layer(name, path):
    """A copy of a stored checkpoint that has its layer that drafts."""
    shutil.copytree(GOLDENS / name, path)
    tensors = load_file(path / "model.safetensors") | load_file(GOLDENS / "mtp" / f"{name}.safetensors")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", ["qwen3-next", "glm4-moe"])
def test_drafts_are_those_of_transformers_layers(golden, nan_pool, tmp_path, name):
    found, weights = opened(with_next_layer(name, tmp_path / "model"), tmp_path)
    assert found.num_drafts == 3
    model, expected = golden(name, 8), np.load(GOLDENS / "mtp" / f"{name}.npz")
    steps, params = model.drafted_by(found.proposer, weights, 8, 3)
    drafts = drafter_after(steps, params, 3, nan_pool)
    for row, length in enumerate(expected["lengths"]):
        made = drafts(model.prompt[: length + 1])
        assert made.lens == 3 and made.tokens.tolist() == expected["drafts"][row].tolist()
        np.testing.assert_allclose(made.scores, expected["logits"][row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", mostly_slow(["llama-default", "qwen3-next"], always=["qwen3-next"]))
def test_answers_are_those_without_drafts(golden, nan_pool, name):
    model = golden(name, 8)
    head = head_of("mtp", model.config)
    counts = assert_solo(model, Mtp(head), random_params(head), names=("sampled",), fill=nan_pool)
    assert 0 < counts[2] < counts[1]


def test_a_head_in_a_directory_is_opened_for_its_model(tmp_path):
    path = GOLDENS / "llama-default"
    target = open_checkpoint(path).config
    head = head_of("mtp", target, 20)
    write_drafter(tmp_path / "head", head, random_params(head), target)
    found, weights = opened(path, tmp_path, tmp_path / "head")
    assert found.proposer == Mtp(head) and weights.head.shape == (20, target.hidden_dim)
    head = head_of("eagle3", target, 0, (0, 1, 2))
    write_drafter(tmp_path / "head", head, random_params(head), target)
    with pytest.raises(ConfigError, match="is a head for proposer='eagle3', and proposer='mtp' is chosen"):
        opened(path, tmp_path, tmp_path / "head")


def test_a_model_without_a_layer_that_drafts_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\) has none; give a head as drafter"):
        opened(GOLDENS / "llama-default", tmp_path)
    with pytest.raises(CheckpointError, match="missing: mtp.pre_fc_norm_embedding.weight"):
        opened(GOLDENS / "qwen3-next", tmp_path)
    shutil.copytree(GOLDENS / "qwen3-next", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match=r"Qwen3NextForCausalLM\) has none"):
        opened(tmp_path / "model", tmp_path)
