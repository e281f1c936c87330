# SPDX-License-Identifier: Apache-2.0
"""Targets are data, and say what is missing before a compiler does."""

import importlib.util

import pytest

from metrale_jax.aot.__main__ import main
from metrale_jax.aot.targets import PLUGINS, TARGETS, target_for
from metrale_jax.core.errors import ConfigError
from pallas_kernels.dispatch import PLATFORMS


def test_an_unknown_target_is_answered_with_the_list():
    with pytest.raises(ConfigError, match=r"'h300' is unknown; use one of \['b200', 'h200', 'v5e', 'v6e', 'v7x'\]"):
        target_for("h300")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_target_has_a_platform_that_kernels_know(name):
    target = target_for(name)
    assert target.name == name
    assert target.platform in PLATFORMS and target.platform in PLUGINS
    assert (target.platform == "cuda") == bool(target.description)


@pytest.mark.parametrize("name", ["h200", "v6e"])
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
