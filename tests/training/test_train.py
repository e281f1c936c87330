# SPDX-License-Identifier: Apache-2.0
"""From a model to a directory that opens as its drafter, and the mistakes that a user can make on the way."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from metrale_jax import cli
from metrale_jax.checkpoint.place import load_params
from metrale_jax.core.errors import ConfigError
from metrale_jax.progress import silent
from metrale_jax.speculative.drafter_files import open_drafter
from metrale_jax.speculative.heads import HEADS, KINDS
from metrale_jax.training.options import KIND_NAMES, TrainOptions
from metrale_jax.training.train import train_drafter

SMALL = TrainOptions(
    answers=4, held_out=2, answer_tokens=8, draft_vocab_size=24, steps=4, row_tokens=32, turns=1, measured_rows=1
)


def test_kinds_have_one_list():
    assert set(KIND_NAMES) == set(KINDS) == {kind.name for kind in HEADS.values()}


@pytest.mark.parametrize("name, kind", [("llama-default", "eagle3"), ("mamba2-tied", "mtp")])
def test_a_drafter_is_trained_and_opens(name, kind, tiny, tmp_path):
    llm, said = tiny(name), []
    options = replace(SMALL, kind=kind, data=str(tmp_path / "data"))
    figures = train_drafter(llm, tmp_path / "out", options, silent, said.append)
    assert figures == json.loads((tmp_path / "out" / "training.json").read_text())
    assert [one["temperature"] for one in figures["held_out"]] == [0.0, 0.7, 1.0]
    assert figures["answers"] == {"learnt": 4, "held_out": 2} and figures["history"][-1]["step"] == 4
    assert any("step 4 of 4" in line for line in said)
    drafter = open_drafter(tmp_path / "out", llm.loaded.config)
    head = load_params(drafter.specs, drafter.source, np.dtype(np.float32), lambda array, spec: array)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(head))
    table = np.asarray(llm.loaded.params.embed)
    rows = table if isinstance(llm.loaded.params.head, tuple) else np.asarray(llm.loaded.params.head)
    np.testing.assert_array_equal(head.head, rows[head.token_ids])
    with pytest.raises(ConfigError, match="holds a drafter that is finished"):
        train_drafter(llm, tmp_path / "out", options, silent, said.append)
    if kind == "mtp":
        return
    # The same answers and rows, and so the same drafter to the last bit.
    train_drafter(llm, tmp_path / "again", options, silent, said.append)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kind", "medusa"], "kind='medusa' is not one of eagle3, mtp"),
        (["--steps", "0"], "steps=0 is below 1"),
        (["--learning-rate", "0"], "learning_rate=0.0 is not a number above 0"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(arguments, message, tmp_path, capsys):
    given = ["train-drafter", "--model", "no-such-model", "--output", str(tmp_path / "out"), *arguments]
    assert cli.main(given) == 2
    assert message in capsys.readouterr().err
