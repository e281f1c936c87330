# SPDX-License-Identifier: Apache-2.0
"""The command line, in processes of its own where exit codes matter."""

import argparse
import io
import subprocess
import sys

import pytest

from metrale_jax import cli
from metrale_jax.flags import add_flags, chosen
from metrale_jax.llm_config import LLMConfig
from metrale_jax.sampling.params import SamplingParams
from tests.conftest import GOLDENS


def run(arguments, capsys, stdin="", monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["generate", "--model", "no-such-model", "hello"], "no-such-model"),
        (["generate", "--top-p", "0", "hello"], "top_p=0.0"),
        (["generate", "--temperature", "nan", "hello"], "temperature=nan"),
        (["generate", "--max-tokens", "0", "hello"], "max_tokens=0"),
        (["generate", ""], "prompt of 0 characters"),
        (["generate", "--model", str(GOLDENS / "llama-default"), "--no-compile-cache", "--raw", "hello"], "tokenizer"),
        (
            ["generate", "--model", str(GOLDENS / "llama-default"), "--compile-cache", "/dev/null/x", "hi"],
            "compile cache",
        ),
        (
            ["generate", "--model", str(GOLDENS / "llama-default"), "--profile", "/dev/null/x", "hi"],
            "profile directory",
        ),
        (["chat", "--model", str(GOLDENS / "llama-default"), "--profile", "/dev/null/x"], "profile directory"),
        (["generate", "--model", "no-such-model", "--request-log", "/dev/null/x", "hi"], "request_log"),
        (["inspect", "--model", str(GOLDENS)], "config.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, words, capsys, monkeypatch):
    status, out, err = run(arguments, capsys, "", monkeypatch)
    assert status == 2
    assert out == ""
    # Progress bars overwrite themselves with carriage returns; what stays is the last part.
    lines = [line.rsplit("\r", 1)[-1] for line in err.split("\n")]
    lines = [line for line in lines if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("metrale-jax: ") and words in lines[0]


@pytest.mark.parametrize(
    "given, expected",
    [
        (["--logit-bias", "5:1,7:-2", "--logit-bias", "9:.5"], {"logit_bias": ((5, 1.0), (7, -2.0), (9, 0.5))}),
        (["--early-stopping", "never"], {"early_stopping": "never"}),
        (["--early-stopping"], {"early_stopping": True}),
        (["--no-early-stopping"], {"early_stopping": False}),
    ],
)
def test_flags_reach_every_value_of_a_field(given, expected):
    parser = argparse.ArgumentParser()
    add_flags(parser, SamplingParams)
    params = SamplingParams(**chosen(parser.parse_args(given), SamplingParams))
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize("given", [["--logit-bias", "5"], ["--logit-bias", "a:1"], ["--early-stopping", "often"]])
def test_a_flag_that_cannot_be_read_is_told(given, capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser, SamplingParams)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert given[1] in capsys.readouterr().err


def test_the_installed_command_exits_2_too():
    command = [sys.executable, "-m", "metrale_jax.cli", "generate", "--top-p", "2", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "top_p=2.0" in done.stderr


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "metrale_jax", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: metrale-jax") and "generate" in done.stdout


def test_help_tells_what_the_fields_mean(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    told = "".join(capsys.readouterr().out.split())
    for config in (SamplingParams, LLMConfig):
        assert "".join(config.__doc__.replace("`", "").split()) in told


def test_inspect_says_what_a_checkpoint_is_and_needs(capsys):
    status, out, _ = run(["inspect", "--model", "smollm2-135m"], capsys)
    assert status == 0
    rows = dict(line.split(None, 1) for line in out.splitlines() if not line.startswith("memory"))
    assert rows["family"] == "llama"
    assert rows["parameters"] == "134,515,008"
    assert "9 heads over 3, 64 wide" in rows["attention"]
    assert "513.1 MiB weights + 45 KiB a token" in out


@pytest.mark.slow
def test_generate_streams_an_answer_and_its_speed(capsys, tmp_path):
    options = ["--compile-cache", str(tmp_path), "--max-context-tokens", "256", "--max-tokens", "24"]
    status, out, err = run(["generate", *options, "What is the capital of France?"], capsys)
    assert status == 0
    assert "Paris" in out
    assert "tokens/s" in err and "prompt tokens" in err
    assert any(tmp_path.iterdir()), "compiled programs were kept"


def test_a_profile_of_a_batch_holds_a_trace_and_each_request_leaves_a_line(capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": [3, 4, 5], "max_tokens": 2}\n')
    command = ["batch", "--model", str(GOLDENS / "llama-default"), "--max-context-tokens", "64", "--max-sequences", "2"]
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    watching = ["--profile", str(tmp_path / "profile"), "--request-log", str(tmp_path / "log"), "--no-compile-cache"]
    status, out, err = run([*command, *paths, *watching, "--quiet"], capsys)
    assert (status, out, err) == (0, "", "")
    assert [path.stat().st_size > 1000 for path in tmp_path.glob("profile/**/*.xplane.pb")] == [True]
    assert '"generated_tokens": 2' in (tmp_path / "log").read_text()
    # What cannot be recorded is told before anything is loaded, and leaves no answers.
    status, _, err = run(
        ["batch", "--model", "no-such-model", *paths, "--no-resume", "--profile", "/dev/null/x"], capsys
    )
    assert status == 2 and "profile directory" in err


@pytest.mark.slow
def test_chat_keeps_the_conversation(capsys, monkeypatch, tmp_path):
    options = ["--compile-cache", str(tmp_path), "--max-context-tokens", "512", "--max-tokens", "40", "--quiet"]
    lines = "My name is Zanzibar. Remember it.\nWhat is my name?\n\n"
    status, out, _ = run(["chat", *options], capsys, lines, monkeypatch)
    assert status == 0
    assert "Zanzibar" in out.splitlines()[-1] or "Zanzibar" in out
