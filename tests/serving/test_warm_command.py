# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax warm`: what it leaves behind is all that a start needs, wherever it is moved to."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metrale_jax import cli
from tests.serving.tiny_chat import write_tiny_chat

LIMITS = ("--max-context-tokens", "64", "--max-sequences", "1", "--prefill-tokens", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_chat(tmp_path_factory.mktemp("warm") / "model")


@pytest.fixture(scope="module")
def programs(model):
    """A directory that a first run filled, and what it said."""
    directory = model.parent / "programs"
    return directory, warmed(model, directory)


def run(*arguments):
    command = [sys.executable, "-m", "metrale_jax", *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )


def warmed(model, directory):
    done = run("warm", model, *LIMITS, "--compile-cache", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def entries(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_moved_directory_has_all_that_is_needed(model, programs, tmp_path):
    directory, said = programs
    kept = entries(directory)
    num_programs = int(said.split()[0])
    assert len(kept) >= num_programs > 5 and f"holds {len(kept)} files" in said
    moved = tmp_path / "elsewhere"
    directory.rename(moved)
    try:
        assert int(warmed(model, moved).split()[0]) == num_programs
        assert entries(moved) == kept, "nothing was compiled anew"
    finally:
        moved.rename(directory)


def test_a_server_finds_all_that_was_left(model, programs):
    directory, _ = programs
    kept = entries(directory)
    command = [sys.executable, "-m", "metrale_jax", "serve", str(model), *LIMITS, "--compile-cache", str(directory)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    server = subprocess.Popen([*command, "--grpc-port", "0"], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        next(line for line in server.stderr if json.loads(line).get("state") == "serving")
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0 and entries(directory) == kept
    finally:
        server.kill()
        server.communicate()


def test_an_entry_that_is_cut_short_is_passed_over(model, programs):
    directory, _ = programs
    cut = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    whole = cut.read_bytes()
    cut.write_bytes(whole[:100])
    try:
        assert "programs in" in warmed(model, directory)
    finally:
        cut.write_bytes(whole)


def test_a_server_that_would_look_nowhere_cannot_be_warmed(capsys):
    assert cli.main(["warm", "smollm2-135m", "--no-keep-programs"]) == 2
    assert "keep_programs=False keeps no compiled programs" in capsys.readouterr().err


def test_settings_are_those_of_the_server(capsys, monkeypatch):
    monkeypatch.setenv("METRALE_MAX_SEQUENCES", "3")
    assert cli.main(["warm", "m", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "max_sequences = 3  # environment" in printed
    assert f'compile_cache = "{Path.home()}/.cache/metrale-jax/programs"' in printed
