# SPDX-License-Identifier: Apache-2.0
"""A batch in a process of its own that is killed at random instants and started again until it is done."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.serving.batch.inputs import held_correct, mixed, read, write

REQUESTS = 100


def start(source, output, *flags):
    arguments = ["--input", str(source), "--output", str(output), "--quiet", "--in-flight", "8", *flags]
    command = [sys.executable, "-m", "tests.serving.batch.fake_run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_until_done(source, output, rng, *flags):
    """Runs the batch, killing it a random time into its work, until it ends by itself; returns how often it died.

    Each is left longer than those before it, so that it comes to an end on a machine of any speed.
    """
    for kills in range(100):
        with start(source, output, "--torn", "--announce", "--step-ms", "2", *flags) as process:
            working = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.12) * (1 + kills / 8) if working else 0)
            if working and process.poll() is None:
                process.kill()
                process.wait()
            else:
                _, errors = process.communicate()
                assert process.returncode == 0, errors
                return kills
    raise AssertionError("it never ended")


@pytest.mark.parametrize("order", ["any", "input"])
def test_killed_at_any_instant_it_ends_with_one_right_line_for_each_request(tmp_path, order):
    requests = mixed(REQUESTS)
    lines = [*requests, b'{"torn', {"id": "bad", "prompt": "x", "n": 0}, requests[0]]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    kills = killed_until_done(source, output, random.Random(order), "--order", order, "--window", "40")
    assert kills >= 3
    records = read(output)
    errors = [records.pop(line)["error"]["code"] for line in range(REQUESTS + 1, REQUESTS + 4)]
    assert errors == ["invalid_json", "invalid_request", "duplicate_id"]
    held_correct(records, requests)
    assert order == "any" or list(records) == sorted(records)


def test_killed_while_it_writes_parquet_it_ends_with_one_row_for_each_request(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    source, output = write(tmp_path / "in.jsonl", mixed(REQUESTS)), tmp_path / "out.parquet"
    kills = killed_until_done(source, output, random.Random(5), "--window", "40")
    assert kills >= 3
    assert sorted(parquet.read_table(output).column("line").to_pylist()) == list(range(1, REQUESTS + 1))
    assert not list(output.glob(".*"))


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_with_a_word_on_how_to_go_on(tmp_path, number, status):
    source, output = write(tmp_path / "in.jsonl", mixed(REQUESTS)), tmp_path / "out.jsonl"
    with start(source, output, "--step-ms", "20") as process:
        while process.poll() is None and not (output.exists() and output.stat().st_size > 1000):
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == status
    done = len(read(output))
    told = f"metrale-jax: {number.name} stopped it after {done} of {REQUESTS} lines; the same command goes on"
    assert errors == f"{told} from there.\n"
    assert 0 < done < REQUESTS
    with start(source, output) as process:
        process.communicate()
    assert process.returncode == 0
    held_correct(read(output), mixed(REQUESTS))


def test_a_signal_ends_the_wait_for_an_idle_stream(tmp_path):
    arguments = ["--input", "-", "--output", str(tmp_path / "out.jsonl"), "--quiet", "--announce"]
    command = [sys.executable, "-m", "tests.serving.batch.fake_run", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.writelines('{"prompt": "a"}\n' for _ in range(1000))  # as many as are read before the work begins
    process.stdin.flush()
    assert process.stdout.readline() == "loaded\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "SIGTERM stopped it" in errors
