# SPDX-License-Identifier: Apache-2.0
"""Devices that share a model give the tokens and logits of one, in a process of their own with eight CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SLOW_GROUPS = [["gemma2", "gemma3", "phi3-longrope"], ["qwen2-window", "granite-bias"]]
GROUPS = [["olmo2 heads", "qwen3 vocabulary", "llama tied"]]


def named(names: list[str], *marks):
    return pytest.param(names, id="-".join(names).replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("names", [*map(named, GROUPS), *(named(names, pytest.mark.slow) for names in SLOW_GROUPS)])
def test_devices_that_share_a_model_compute_what_one_does_alone(names, tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("sharded_script.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.split("\n")[:-1] == [f"ok {name}" for name in names], done.stderr[
        -4000:
    ]
