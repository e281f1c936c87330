# SPDX-License-Identifier: Apache-2.0
"""Parquet in and out."""

import json
import sys

import pytest

from serving.batch.parquet import ParquetParts, row_json
from tests.serving.batch.inputs import chat, expected_texts, held_correct, mixed, read, run, write

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def test_rows_are_read_as_lines_are(tmp_path):
    requests = [
        {"id": "a", "prompt": "x", "temperature": 0.5, "stop": ["y"], "top_p": None},
        {"id": "b", "prompt": "z"},
        {"id": "c", "prompt": "z", "top_p": 9.0},
    ]
    parquet.write_table(arrow.Table.from_pylist(requests), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl") == 0
    records = read(tmp_path / "out.jsonl")
    assert "top_p=9.0" in records.pop(3)["error"]["message"]
    held_correct(records, requests[:2])


@pytest.mark.parametrize("spelling", [lambda body: body, json.dumps], ids=["struct", "text"])
def test_bodies_may_be_structs_or_json_text(tmp_path, spelling):
    requests = [chat("a", "x"), chat("b", "y", n=2)]
    rows = [{**request, "body": spelling(request["body"])} for request in requests]
    (tmp_path / "in.parquet").mkdir()
    for index, row in enumerate(rows):
        parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "in.parquet" / f"{index}.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl", "--order", "input") == 0
    held_correct(read(tmp_path / "out.jsonl"), requests)


def test_a_body_nested_too_deep_stays_the_text_that_it_is():
    body = "[" * 60_000 + "]" * 60_000
    assert json.loads(row_json({"custom_id": "a", "body": body})) == {"custom_id": "a", "body": body}


@pytest.mark.parametrize("order", ["any", "input"])
def test_answers_come_out_in_typed_columns_part_by_part(tmp_path, order, monkeypatch):
    monkeypatch.setattr(ParquetParts, "min_rows", 16)
    requests = [*mixed(80), {"id": 80, "prompt": ""}]
    output = tmp_path / "out.parquet"
    assert run(write(tmp_path / "in.jsonl", requests), output, "--order", order, "--window", "20") == 0
    assert len(list(output.iterdir())) > 2
    rows = parquet.read_table(output).to_pylist()
    lines = [row["line"] for row in rows]
    assert sorted(lines) == list(range(1, 82)) and (lines == sorted(lines)) == (order == "input")
    by_line = {row["line"]: row for row in rows}
    assert by_line[81]["error"]["code"] == "invalid_request" and by_line[81]["id"] == "80"
    assert by_line[2]["text"] == expected_texts(2, requests[1])[0]
    assert by_line[3]["token_ids"] == [1, 2] and by_line[3]["custom_id"] == "ids-2"
    body = json.loads(by_line[4]["response"])["body"]
    assert [choice["text"] for choice in body["choices"]] == expected_texts(4, requests[3])


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path, capsys):
    (tmp_path / "out.parquet").write_bytes(b"mine")
    assert run(write(tmp_path / "in.jsonl", mixed(2)), tmp_path / "out.parquet") == 2
    assert "is a file" in capsys.readouterr().err and (tmp_path / "out.parquet").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]


def test_a_file_that_is_no_parquet_is_told(tmp_path, capsys):
    (tmp_path / "in.parquet").write_bytes(b"no parquet at all")
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl") == 2
    assert "in.parquet" in capsys.readouterr().err


def test_without_pyarrow_the_way_out_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl") == 2
    assert "pip install 'metrale-jax[parquet]'" in capsys.readouterr().err
