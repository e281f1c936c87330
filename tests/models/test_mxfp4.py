# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights against transformers' own dequantisation, and files that are not what they claim."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from metrale_jax.checkpoint.place import load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.loading import open_checkpoint
from metrale_jax.models.gpt_oss import halves
from metrale_jax.models.mxfp4 import Mxfp4Rows
from tests.conftest import GOLDENS

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_every_value_is_what_transformers_makes_of_it():
    stored = np.load(GOLDENS / "mxfp4.npz")
    weights = Mxfp4Rows("w")(stored["blocks"], stored["scales"]).astype(np.float32)
    np.testing.assert_array_equal(weights, stored["weights"].swapaxes(1, 2))
    arranged = Mxfp4Rows("w", halves)(stored["blocks"], stored["scales"]).astype(np.float32)
    np.testing.assert_array_equal(arranged, np.concatenate([weights[:, 0::2], weights[:, 1::2]], axis=1))


def load(path):
    checkpoint = open_checkpoint(path)
    load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
    dtype = np.dtype(np.float32)
    return load_params(checkpoint.specs, checkpoint.source, dtype, lambda array, spec: jnp.asarray(array))


@pytest.fixture
def copied(tmp_path):
    """`copied(tensors, config)`: the path of the stored checkpoint with changes made to its tensors and its config."""

    def make(change=lambda tensors: None, config=lambda values: None):
        path = shutil.copytree(GOLDENS / "gpt-oss-mxfp4", tmp_path / "copy")
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        values = json.loads((path / "config.json").read_text())
        config(values)
        (path / "config.json").write_text(json.dumps(values))
        return path

    return make


def spoil_scale(tensors):
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"].copy()
    tensors[f"{GATE_UP}_scales"][1, 2, 0] = 255


FAULTS = [
    (spoil_scale, rf"{GATE_UP}_scales holds 255, above 252"),
    (lambda tensors: tensors.pop(f"{GATE_UP}_scales"), rf"1 tensor is missing: {GATE_UP}_scales"),
    (
        lambda tensors: tensors.update({f"{GATE_UP}_blocks": tensors[f"{GATE_UP}_blocks"][..., :8].copy()}),
        rf"{GATE_UP}_blocks is \[5, 64, 2, 8\], expected \[5, 64, 2, 16\]",
    ),
    (
        lambda tensors: tensors.update({f"{GATE_UP}_blocks": tensors[f"{GATE_UP}_blocks"].astype(np.int8)}),
        rf"{GATE_UP}_blocks is int8, expected uint8",
    ),
]


@pytest.mark.parametrize("change, words", FAULTS, ids=["scale", "missing", "shape", "type"])
def test_a_faulty_file_is_named(copied, change, words):
    with pytest.raises(CheckpointError, match=words):
        load(copied(change))


def test_rows_that_are_no_whole_blocks_are_refused(copied):
    with pytest.raises(ConfigError, match="has 63 columns, not a multiple of 32"):
        open_checkpoint(copied(config=lambda values: values.update(hidden_size=63)))


def test_another_quantisation_is_refused(copied):
    with pytest.raises(ConfigError, match="quant_method='gptq' in .* of this model quant_method=mxfp4 is read"):
        open_checkpoint(copied(config=lambda values: values["quantization_config"].update(quant_method="gptq")))
