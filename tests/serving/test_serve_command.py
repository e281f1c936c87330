# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax serve` as an operator meets it: in a process of its own, over a model that is small and real."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager

import pytest

from metrale_jax import cli
from serving.client import Client, ExhaustedError, RetryPolicy, UnauthenticatedError
from tests.serving.tiny_chat import write_tiny_chat

TOKEN = "alice-0123456789-secret"


@contextmanager
def started(*arguments, **variables):
    command = [sys.executable, "-m", "metrale_jax", "serve", *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_server_is_configured_serves_drains_and_exits_0(tmp_path):
    model = write_tiny_chat(tmp_path / "model")
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nid = "alice"\ntoken = "{TOKEN}"\nrequests_per_minute = 2\n')
    keys.chmod(0o600)
    config = tmp_path / "config.toml"
    config.write_text(f'key_file = "{keys}"\nkeep_programs = false\nwarm_up = false\nserved_name = "file"\n')
    limits = ("--max-context-tokens", 64, "--max-sequences", 2, "--grpc-port", 0)
    with started(model, "--config", config, *limits, METRALE_SERVED_NAME="tiny", METRALE_PREFILL_TOKENS="16") as server:
        lines = (json.loads(line) for line in server.stderr)
        listening = next(line for line in lines if line["event"] == "listening")
        assert (listening["model"], listening["keys"], listening["side"]) == ("tiny", 1, "")
        next(line for line in lines if line.get("state") == "serving")
        with Client(listening["grpc"], token=TOKEN, timeout_s=60, retries=RetryPolicy(max_attempts=1)) as client:
            answers = [client.generate("secret words", max_tokens=4, temperature=0) for _ in range(2)]
            assert answers[0].token_ids == answers[1].token_ids and len(answers[0].token_ids) == 4
            assert [model.id for model in client.models()] == ["tiny"]
            with pytest.raises(ExhaustedError) as told:
                client.generate("secret words", max_tokens=4)
            assert 0 < told.value.retry_after_s <= 30
        with Client(listening["grpc"], timeout_s=60) as stranger, pytest.raises(UnauthenticatedError):
            stranger.generate("a", max_tokens=1)
        server.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert server.wait(60) == 0
    calls = [line for line in rest if line["event"] == "call"]
    assert [call["outcome"] for call in calls if call["method"] == "GenerateUnary"] == [
        "ok",
        "ok",
        "exhausted",
        "unauthenticated",
    ]
    assert [call["key"] for call in calls if call["outcome"] != "unauthenticated"] == ["alice"] * (
        len(calls) - 1
    ) and calls[0]["generated_tokens"] == 4
    assert rest[-1]["event"] == "stopped" and rest[-1]["status"] == 0
    assert "secret words" not in json.dumps(rest) and TOKEN not in json.dumps(rest)


def test_a_mistake_in_the_model_is_exit_2_and_its_last_line_says_so():
    with started("/no/such/model", "--grpc-port", 0, "--no-keep-programs") as server:
        _, log = server.communicate(timeout=120)
    assert server.returncode == 2 and log.splitlines()[-1].startswith("metrale-jax: ") and "/no/such/model" in log


def test_settings_are_printed_with_where_they_came_from(capsys, monkeypatch, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("max_sequences = 3\nmax_waiting_requests = 9\n")
    monkeypatch.setenv("METRALE_CONFIG", str(config))
    monkeypatch.setenv("METRALE_MAX_SEQUENCES", "5")
    assert cli.main(["serve", "some-model", "--grpc-port", "7", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["model"] == "some-model"
    for line in (
        "max_sequences = 5  # environment",
        "max_waiting_requests = 9  # file",
        "grpc_port = 7  # flag",
        "side_port = 0  # default",
    ):
        assert line in printed.splitlines()
    assert 'programs"  # default' in printed


@pytest.mark.parametrize(
    "arguments, environment, words",
    [
        (["--grpc-port", "70000"], {}, "grpc_port=70000"),
        (["--config", "/no/such/file"], {}, "/no/such/file"),
        ([], {"METRALE_CONFIG": "/no/such/file"}, "/no/such/file"),
        ([], {"METRALE_GRPC_PROT": "7"}, "METRALE_GRPC_PORT is the nearest"),
        (["--key-file", "/no/such/file", "--side-port", "0"], {}, "/no/such/file"),
        (["--kv-cache-mib", "0"], {}, "kv_cache_mib=0"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, environment, words, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", "--grpc-port", "0", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("metrale-jax: ") and words in lines[0]


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_reflection", None)
    assert cli.main(["serve"]) == 2
    assert "pip install 'metrale-jax[serve]'" in capsys.readouterr().err
