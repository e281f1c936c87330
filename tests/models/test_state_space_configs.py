# SPDX-License-Identifier: Apache-2.0
"""Configs of families with Mamba-2 layers: faults are named, infinities understood, multipliers folded."""

import json

import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError, Unsupported
from metrale_jax.loading import open_checkpoint
from metrale_jax.models.mamba2_specs import Scaled
from tests.conftest import GOLDENS
from tests.models.test_goldens import rewritten, setting

FAULTS = [
    ("mamba2", setting(num_heads=5), ConfigError, "5 Mamba heads of 12 .* the 72 channels"),
    ("mamba2", setting(n_groups=4), ConfigError, "n_groups=4"),
    ("mamba2", setting(time_step_limit=[1.0, 0.5]), ConfigError, r"time_step_limit=\[1.0, 0.5\]"),
    ("mamba2", setting(time_step_limit=[0.0, "much"]), ConfigError, "time_step_limit"),
    ("mamba2", setting(hidden_act="gelu"), ConfigError, "hidden_act='gelu'"),
    ("nemotron-h-old-spelling", setting(hybrid_override_pattern="MX"), ConfigError, "hybrid_override_pattern='MX'"),
    ("nemotron-h", setting(layers_block_type=["conv"]), Unsupported, r"layers of \['conv'\]"),
    ("nemotron-h-experts", setting(moe_latent_size=8), Unsupported, "moe_latent_size=8"),
    ("bamba", setting(attn_layer_indices=[3]), ConfigError, r"attn_layer_indices=\[3\]"),
    ("falcon-h1", setting(ssm_multipliers=[1.0]), ConfigError, "ssm_multipliers=.* 5 numbers"),
]


@pytest.mark.parametrize("name, change, error, words", FAULTS, ids=[f"{case[0]}-{case[3]}" for case in FAULTS])
def test_a_faulty_config_is_named(name, change, error, words, tmp_path):
    with pytest.raises(error, match=words):
        open_checkpoint(rewritten(tmp_path, name, change))


@pytest.mark.parametrize("infinity", [float("inf"), "inf", {"__float__": "Infinity"}], ids=str)
def test_infinite_steps_are_understood_however_they_are_written(infinity, tmp_path):
    path = rewritten(tmp_path, "mamba2", setting(time_step_limit=[0.0, infinity]))
    (mixer,) = open_checkpoint(path).config.layers[0].mixers
    assert (mixer.min_step, mixer.max_step) == (0.0, float("inf"))


def test_nemotron_h_keeps_its_least_step_and_no_limit():
    values = json.loads((GOLDENS / "nemotron-h" / "config.json").read_text())
    assert values["time_step_limit"][0] == 0.0 and values["time_step_min"] == 0.3
    (mixer,) = open_checkpoint(GOLDENS / "nemotron-h").config.layers[0].mixers
    assert (mixer.min_step, mixer.max_step) == (0.3, float("inf"))


def test_rows_of_stacked_sources_are_scaled_run_by_run():
    first, second = np.ones((2, 3), np.float16), np.ones((1, 3), np.float16)
    found = Scaled(((1, 2.0), (2, 0.1)))(first, second)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 0], np.asarray([2.0, 0.1, 0.1], np.float32))
