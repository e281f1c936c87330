# SPDX-License-Identifier: Apache-2.0
"""The stage over a Ray Dataset: its pieces without Ray, and the whole on a local Ray of two workers."""

import json
import shutil
import subprocess
import sys

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from serving.batch.records import Origin
from serving.batch.requests import seed_of
from serving.ray_batch import BatchStage, Job, done_digests, row_key, undone
from tests.serving.batch.fake import FakeBackend, answer_to

ROWS = [{"id": f"r{i}", "prompt": f"say {i}", "top_p": 5.0 if i % 10 == 9 else None} for i in range(60)]


def held_correct(output, rows):
    got = {row["custom_id"]: row for row in parquet.read_table(output).to_pylist()}
    assert parquet.read_table(output).num_rows == len(got) == len(rows)
    for row in rows:
        record = got[row["id"]]
        if row["top_p"]:
            assert "top_p=5.0" in record["error"]["message"]
        else:
            assert record["text"] == answer_to(row["prompt"], seed_of(Origin(1, False, "id", row["id"])))


def test_a_part_holds_the_rows_of_a_table_and_they_are_then_done(tmp_path):
    table = arrow.Table.from_pylist(ROWS)
    stage = BatchStage(str(tmp_path), Job(FakeBackend, "fake"), 0)
    assert undone(table, done_digests(tmp_path)).num_rows == 60
    assert stage(table.slice(0, 25)) == {"answered": [23], "refused": [2], "tokens": [46]}
    rest = undone(table, done_digests(tmp_path))
    assert rest.column("id").to_pylist() == [row["id"] for row in ROWS[25:]]
    stage(rest)
    assert undone(table, done_digests(tmp_path)).num_rows == 0
    held_correct(tmp_path, ROWS)


def test_a_table_that_is_done_again_writes_the_same_part(tmp_path):
    table = arrow.Table.from_pylist(ROWS)
    for _ in range(2):
        BatchStage(str(tmp_path), Job(FakeBackend, "fake"), 0)(table)
    assert len(list(tmp_path.iterdir())) == 1
    held_correct(tmp_path, ROWS)


def test_rows_without_an_id_are_known_by_what_they_hold(tmp_path):
    table = arrow.Table.from_pylist([{"prompt": "a", "n": None}, {"prompt": "b", "n": 2}, {"prompt": "a", "n": None}])
    BatchStage(str(tmp_path), Job(FakeBackend, "fake"), 0)(table)
    assert undone(table, done_digests(tmp_path)).num_rows == 0
    assert parquet.read_table(tmp_path).num_rows == 2, "equal rows are one"
    assert row_key({"prompt": "a"}) == row_key({"prompt": "a", "n": None})


def test_openai_rows_keep_their_form(tmp_path):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    row = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(body)}
    BatchStage(str(tmp_path), Job(FakeBackend, "fake"), 0)(arrow.Table.from_pylist([row]))
    (got,) = parquet.read_table(tmp_path).to_pylist()
    response = json.loads(got["response"])
    assert got["custom_id"] == "c" and response["request_id"] == got["id"]
    assert response["body"]["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_two_workers_of_a_local_ray_answer_each_row_once_through_a_failed_run_and_a_death(tmp_path):
    # Ray listens on all interfaces; in a network namespace of its own nothing hears it, where one can be had.
    alone = ["unshare", "-rn", "bash", "-c", 'ip link set lo up && exec "$@"', "-"]
    command = [sys.executable, "-m", "tests.serving.ray_run", str(tmp_path)]
    if shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        command = [*alone, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (tmp_path / "died").exists() and told["parts_at_the_break"] > 0
    assert told["answered"] + told["refused"] == 60 - told["rows_at_the_break"]
    assert told["workers"] == 2
    held_correct(tmp_path / "out.parquet", ROWS)
