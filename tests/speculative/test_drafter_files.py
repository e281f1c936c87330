# SPDX-License-Identifier: Apache-2.0
"""Directories of draft heads: what their fields mean to those who publish them, and what a fault in them is told as."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.speculative.drafter_files import open_drafter, write_drafter
from metrale_jax.speculative.heads import default_capture
from tests.conftest import GOLDENS
from tests.speculative.plain_head import LAYER, TARGET, VD, V, config_of, params_of

PLACES = "eagle_aux_hidden_state_layer_ids"
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


def head_with(directory, kind="eagle3", **changes):
    """The directory of a head whose config has other values; None takes a field away."""
    config = config_of(kind)
    write_drafter(directory, config, params_of(config), TARGET)
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return directory


def nested(numbers):
    return {"eagle_config": {PLACES: numbers}}


@pytest.mark.parametrize(
    "changes, capture",
    [
        (nested([0, 2, 5]), (1, 3, 6)),
        (nested([-1, 2, 5]), (0, 3, 6)),
        ({"eagle_config": None, PLACES: [0, 2, 5]}, (0, 2, 5)),
        ({"eagle_config": {}, PLACES: [1, 3, 6]}, (1, 3, 6)),
        ({**nested([0, 2, 5]), PLACES: [1, 3, 6]}, (1, 3, 6)),
        (nested([]), default_capture(6)),
        ({"eagle_config": None}, default_capture(6)),
    ],
    ids=["nested", "nested-embeddings", "flat", "flat-beside-empty", "both", "empty", "neither"],
)
def test_numbers_in_eagle_config_name_layers_and_those_at_the_top_count_them(tmp_path, changes, capture):
    assert open_drafter(head_with(tmp_path, **changes), TARGET).config.capture == capture


def test_the_published_numbers_of_a_model_of_94_layers_are_the_usual_places(tmp_path):
    target = replace(TARGET, layers=(LAYER,) * 94)
    found = open_drafter(head_with(tmp_path, target=None, **nested([1, 46, 90])), target)
    assert found.config.capture == default_capture(94) == (2, 47, 91)


def test_places_are_written_as_they_are_published(tmp_path):
    values = json.loads((head_with(tmp_path) / "config.json").read_text())
    assert config_of("eagle3").capture == (2, 3, 3)
    assert values["eagle_config"] == {"use_aux_hidden_state": True, PLACES: [1, 2, 2]}
    assert PLACES not in values and values["norm_before_residual"] is False


@pytest.mark.parametrize(
    "numbers",
    [5, "abc", {}, ["a", "b", "c"], [0, 1, None], [0.5, 1, 2], [True, 1, 2], [0, 1], [0, 1, 7], [-2, 0, 1], [NAN] * 3],
    ids=repr,
)
def test_places_that_are_none_of_the_target_are_refused(tmp_path, numbers):
    with pytest.raises(ConfigError, match=rf"eagle_config.{PLACES}=.* three whole numbers from -1 to 5, .*correct the"):
        open_drafter(head_with(tmp_path, **nested(numbers)), TARGET)
    with pytest.raises(ConfigError, match=rf"^{PLACES}=.* are not three whole numbers from 0 to 6, .*correct the"):
        open_drafter(head_with(tmp_path, eagle_config=None, **{PLACES: numbers}), TARGET)


FAULTS = [
    ({**nested([0, 2, 5]), PLACES: [0, 2, 5]}, "not one less each; correct either"),
    ({"eagle_config": 0}, "eagle_config=0 .* is not an object"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False .* use one that reads three"),
    ({"norm_before_residual": 1}, "norm_before_residual=1 .* is not true or false"),
    ({"norm_output": True}, "norm_output=True .* not run here; use a head without"),
    ({"norm_before_fc": True}, "norm_before_fc=True"),
    ({"fc_norm": True}, "fc_norm=True"),
    ({"drafter": ["eagle3"]}, "drafter=.'eagle3'. .* is not one of"),
    ({"target": 5}, "target=5 .* is not an object"),
    ({"vocab_size": 41}, "vocab_size=41, the target has .*vocab_size=40.*train-drafter"),
    ({"hidden_size": [16]}, r"hidden_size=\[16\], the target has .*hidden_size=16"),
    ({"rope": "abc"}, "rope='abc' .* is not an object"),
    ({"rope": {}}, "rope .* has no fields, expected inv_freq"),
    ({"rope": {"inv_freq": [1.0, 0.1], "base": 5}}, "has base, inv_freq, expected"),
    ({"rope": {"inv_freq": "abc"}}, "rope.inv_freq='abc' .* is not a list of finite numbers; correct"),
    ({"rope": {"inv_freq": [1.0, "a"]}}, "rope.inv_freq=.* is not a list of finite numbers"),
    ({"rope": {"inv_freq": [1.0, NAN]}}, "rope.inv_freq=.* is not a list of finite numbers"),
    ({"rope": {"inv_freq": [1.0, HUGE]}}, "rope.inv_freq=.* is not a list of finite numbers"),
    ({"rope": {"inv_freq": [1.0, 1e39]}}, "rope.inv_freq=.* is not a list of finite numbers"),
    ({"rope": {"inv_freq": [1.0]}}, "rope.inv_freq of 1 numbers .* is not of 2, which head_dim=4 takes"),
    ({"rope": {"inv_freq": [1.0] * 3}}, "rope.inv_freq of 3 numbers .* is not of 2"),
    ({"rope": {"inv_freq": [1.0] * 2, "attention_factor": "1"}}, "rope.attention_factor='1' .* is not a finite"),
    ({"rope": {"inv_freq": [1.0] * 2, "switch_len": 1.5}}, "rope.switch_len=1.5 .* is not a number of tokens"),
    ({"rope": {"inv_freq": [1.0] * 2, "switch_len": 9}}, "rope.long_inv_freq of 0 numbers with switch_len=9"),
    ({"rope": {"inv_freq": [1.0] * 2, "ntk_max_len": 9}}, "rope.ntk_theta=0.0 and ntk_factor=1.0 .* not above 0"),
    ({"rope": None, "rope_theta": "x"}, "rope_theta='x'"),
    ({"rope": None, "rope_theta": NAN}, "frequencies that are not finite; correct rope_theta"),
    ({"rope": None, "rope_scaling": {"rope_type": ["yarn"]}}, "(?s)does not describe a draft head.*correct the config"),
    ({"head_dim": [3]}, r"head_dim=\[3\]"),
    ({"head_dim": 10**12}, "head_dim=1000000000000 .* is not a width up to 16384"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0.0 .* is not a number above 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 .* is not a number above 0"),
    ({"rms_norm_eps": 1e-60}, "rms_norm_eps=1e-60 .* is not a number above 0"),
    ({"rms_norm_eps": HUGE}, "(?s)does not describe a draft head.*correct the config"),
    ({"logit_softcap": -1}, "logit_softcap=-1.0 .* is not a number from 0 up"),
    ({"logit_scale": NAN}, "logit_scale=nan .* is not a finite number"),
    ({"embed_scale": INFINITE}, "embed_scale=inf .* is not a finite number"),
    ({"residual_scale": 1e39}, "residual_scale=1e.39 .* is not a number that float32 holds"),
    ({"attention_scale": 0}, "attention_scale=0.0 .* is not a number above 0"),
    ({"attention_scale": [1]}, r"attention_scale=\[1\]"),
    ({"draft_vocab_size": False}, "draft_vocab_size=False .* is not a whole number from 0 to vocab_size=40"),
    ({"draft_vocab_size": 41}, "draft_vocab_size=41 .* is not a whole number from 0 to vocab_size=40"),
]


@pytest.mark.parametrize("changes, message", FAULTS, ids=[str(number) for number in range(len(FAULTS))])
def test_a_fault_of_a_field_is_told_with_its_limit(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        open_drafter(head_with(tmp_path, **changes), TARGET)


def test_a_rope_may_turn_the_part_of_a_head_that_the_targets_turns(tmp_path):
    directory = head_with(tmp_path, "mtp", rope={"inv_freq": [1]})
    (attention,) = LAYER.mixers
    part = replace(LAYER, mixers=(replace(attention, rope=replace(attention.rope, inv_freq=(0.5,))),))
    found = open_drafter(directory, replace(TARGET, layers=(LAYER,) * 5 + (part,)))
    assert found.config.layer.mixers[0].rope.inv_freq == (1.0,)


@pytest.mark.parametrize(
    "row, distance, message",
    [
        (3, V, rf"d2t has {V} in row 3, which makes token {V + 3}, and the target's go from 0 to {V - 1}; use the"),
        (2, -3, "d2t has -3 in row 2, which makes token -1"),
        (2, np.iinfo(np.int64).max, "d2t has 9223372036854775807 in row 2"),
        (0, VD - 1, f"d2t makes token {VD - 1} of 2 rows, and each has one; download"),
    ],
    ids=["above", "below", "beyond-integers", "twice"],
)
def test_ids_that_the_target_lacks_or_that_come_twice_are_refused(tmp_path, row, distance, message):
    path = head_with(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = np.zeros(VD, np.int64)
    tensors["d2t"][row] = distance
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        open_drafter(tmp_path, TARGET)


@pytest.mark.parametrize(
    "names, message",
    [
        (5, "architectures=5 in .* names no draft head that is read, .*one of mtp, eagle3; give a directory that"),
        (None, "architectures=None"),
        ("LlamaForCausalLMEagle3", "architectures='LlamaForCausalLMEagle3'"),
        ([5, ["LlamaForCausalLM"], {}], "names no draft head"),
        (["DFlashDraftModel"], "architectures=.'DFlashDraftModel'. in .* names no draft head"),
        (["LlamaForCausalLM"], "is of a whole model, LlamaForCausalLM, .*choose proposer='model', .*train-drafter"),
    ],
    ids=["number", "none", "text", "mixed", "other", "whole"],
)
def test_what_is_no_head_says_what_it_is(tmp_path, names, message):
    with pytest.raises(ConfigError, match=message):
        open_drafter(head_with(tmp_path, drafter=None, architectures=names), TARGET)


def test_a_whole_model_is_for_the_proposer_of_whole_models(tmp_path):
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM, and a draft head is wanted; choose proposer='model'"):
        open_drafter(GOLDENS / "qwen3", TARGET)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="model.gguf is a file, as whole models are in GGUF, .*proposer='model'"):
        open_drafter(tmp_path / "model.gguf", TARGET)


def test_a_speculators_head_is_told_apart(tmp_path):
    changes = {"drafter": None, "architectures": ["Eagle3Speculator"], "transformer_layer_config": {"head_dim": 4}}
    with pytest.raises(ConfigError, match="under transformer_layer_config, as speculators writes it"):
        open_drafter(head_with(tmp_path, **changes), TARGET)


def test_a_number_of_too_many_digits_is_no_traceback(tmp_path):
    (head_with(tmp_path) / "config.json").write_text('{"hidden_size": ' + "1" * 5000 + "}")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_drafter(tmp_path, TARGET)
