# SPDX-License-Identifier: Apache-2.0
"""A whole server with batches in a process of its own that is killed at random instants until they are done."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

from tests.serving.http.batch_fronts import TEXT, jsonl, text

NUM_LINES = 120
DEADLINE_S = 60


@contextmanager
def server(directory, step_ms):
    """A server and its address, once it answers; killed at the end if it still runs."""
    command = [sys.executable, "-m", "tests.serving.http.batch_server", str(directory), str(step_ms)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        listening = next(line for line in map(json.loads, process.stderr) if line["event"] == "listening")
        try:
            with httpx.Client(base_url=f"http://{listening['http']}", timeout=DEADLINE_S) as client:
                yield process, client
        finally:
            process.kill()
            process.stderr.read()


def lines():
    return [text(f"c{n}", f"prompt {n}", max_tokens=1 + n % 23) for n in range(NUM_LINES)]


def held_correct(content):
    records = [json.loads(line) for line in content.splitlines()]
    assert len(records) == NUM_LINES, "each line comes once"
    by_id = {record["custom_id"]: record for record in records}
    for n in range(NUM_LINES):
        body = by_id[f"c{n}"]["response"]["body"]
        assert body["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyz"[: 1 + n % 23]


def begun(client):
    file = client.post("/v1/files", files={"file": ("a", jsonl(lines()))}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h"}
    return client.post("/v1/batches", json=body).json()["id"]


def ended(client, batch):
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        told = client.get(f"/v1/batches/{batch}").json()
        if told["status"] in ("completed", "failed", "expired", "cancelled"):
            return told
        time.sleep(0.02)
    raise AssertionError(told)


def test_killed_at_any_instant_each_line_comes_once(tmp_path):
    rng, kills, batch = random.Random(11), 0, None
    while kills < 3:
        with server(tmp_path, 8) as (_, client):
            batch = batch or begun(client)
            time.sleep(rng.uniform(0.3, 0.7))
            told = client.get(f"/v1/batches/{batch}").json()
            assert told["status"] in ("validating", "in_progress"), "it has not ended, so it is killed in the midst"
            kills += 1
    with server(tmp_path, 0) as (_, client):
        told = ended(client, batch)
        assert told["status"] == "completed" and told["request_counts"]["completed"] == NUM_LINES
        held_correct(client.get(f"/v1/files/{told['output_file_id']}/content").text)


def test_told_to_stop_it_ends_at_once_and_goes_on_at_the_next_start(tmp_path):
    with server(tmp_path, 20) as (process, client):
        batch = begun(client)
        while not 0 < client.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] < NUM_LINES:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        log = [json.loads(line) for line in process.stderr]
        assert process.wait(DEADLINE_S) == 0 and log[-1] == log[-1] | {"event": "stopped", "status": 0}
        assert [line["calls_ended"] for line in log if line["event"] == "drained"] == [0]
    with server(tmp_path, 0) as (_, client):
        told = ended(client, batch)
        assert told["status"] == "completed"
        held_correct(client.get(f"/v1/files/{told['output_file_id']}/content").text)
