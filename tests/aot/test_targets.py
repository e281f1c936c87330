# SPDX-License-Identifier: Apache-2.0
"""Targets are data, and say what is missing before a compiler does."""

import importlib.util

import pytest

from metrale_jax.aot.__main__ import main, roomy
from metrale_jax.aot.chips import CHIPS
from metrale_jax.aot.shapes import model_for
from metrale_jax.aot.targets import PLUGINS, target_for
from metrale_jax.core.errors import ConfigError
from pallas_kernels.dispatch import PLATFORMS


@pytest.mark.parametrize("name", ["h300", "h200-3", "v6e-", "v6e-8-8", "-8", ""])
def test_an_unknown_target_is_answered_with_the_list(name):
    with pytest.raises(ConfigError, match=rf"'{name}' is unknown; use one of \['b200', 'h200', 'v5e', 'v6e', 'v7x'\]"):
        target_for(name)


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_every_chip_has_a_platform_that_kernels_know_and_figures(name):
    chip = CHIPS[name]
    assert chip.name == name
    assert chip.platform in PLATFORMS and chip.platform in PLUGINS
    assert (chip.platform == "cuda") == bool(chip.description)
    assert max(chip.topologies) == 8
    assert 0 < chip.usable_memory < chip.memory
    # Bytes that one FLOP's time moves: thinner for arithmetic than for memory, and for memory than for links.
    assert chip.flops > chip.bandwidth > chip.link_bandwidth > 0


def test_names_of_targets_may_be_in_capitals_and_others_be_known_beside_them():
    assert target_for(" V6E-8\n") == target_for("v6e-8")
    with pytest.raises(ConfigError, match="for so many devices, or here"):
        target_for("there", others=("here",))


def test_a_target_is_so_many_devices_of_a_chip():
    assert (target_for("v6e-8").chip.name, target_for("v6e-8").num_devices) == ("v6e", 8)
    assert [target_for(name).name for name in ("h200", "h200-1", "h200-4")] == ["h200", "h200", "h200-4"]


@pytest.mark.parametrize(
    ("target", "model", "devices"),
    [("h200", "qwen3-32b", 1), ("v5e", "llama-3.1-8b", 2), ("v6e", "qwen3-32b", 4), ("v5e-8", "small", 8)],
)
def test_a_model_that_one_device_lacks_room_for_is_shared(target, model, devices):
    assert roomy(target_for(target), model_for(model)).num_devices == devices


@pytest.mark.parametrize("name", ["h200", "v6e-8"])
def test_a_compiler_that_is_not_installed_is_named_with_its_install_line(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"target '{name}' needs the \w+ compiler.*pip install 'metrale-jax\[aot\]'"):
        target_for(name).devices()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "h300"], "target 'h300' is unknown"),
        (["--models", "9b"], "model '9b' is unknown"),
        (["--steps", "rest"], "step 'rest' is unknown"),
    ],
)
def test_the_command_exits_2_for_what_it_does_not_know(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
