# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax batch` over a real engine."""

import json

import pytest

from metrale_jax import LLM, SamplingParams, cli
from serving.batch.records import Origin
from serving.batch.requests import seed_of
from tests.conftest import GOLDENS
from tests.serving.batch.inputs import chat, read, write


@pytest.fixture(scope="module")
def tiny():
    """A model without a tokenizer."""
    return LLM(GOLDENS / "llama-default", max_context_tokens=64, max_sequences=2, prefill_tokens=16)


def test_answers_are_those_of_generate(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_loaded", lambda arguments: tiny)
    requests = [{"id": i, "prompt": [1 + i % 5, 2, 3 + i], "max_tokens": 4 + i % 3} for i in range(12)]
    requests[3].update(temperature=0, ignore_eos=True)
    requests[4].update(n=2, seed=11)
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [5, 6], "seed": 3}}
    bad = [{"id": "long", "prompt": [1] * 64}, {"id": "vocabulary", "prompt": [10**6]}, chat("chat", "hello")]
    source = write(tmp_path / "in.jsonl", [*requests, completion, *bad])
    output = tmp_path / "out.jsonl"
    assert cli.main(["batch", "--model", "tiny", "--input", str(source), "--output", str(output), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    records = read(output)
    params = []
    for line, request in enumerate(requests, start=1):
        asked = {name: value for name, value in request.items() if name not in ("id", "prompt")}
        params.append(SamplingParams(**{"seed": seed_of(Origin(line, False, "id", request["id"])), **asked}))
    results = tiny.generate([request["prompt"] for request in requests], params)
    for line, result in enumerate(results, start=1):
        record = records[line]
        assert tuple(record["token_ids"]) == result.token_ids and record["finish_reason"] == result.finish_reason
        assert record["usage"]["prompt_tokens"] == 3
    assert [tuple(choice["token_ids"]) for choice in records[5]["choices"]] == [
        choice.token_ids for choice in results[4].choices
    ]
    assert records[13]["response"]["body"]["usage"]["completion_tokens"] == 16
    words = ["no room in a context of 64", "outside the vocabulary", "tokenizer"]
    for line, word in enumerate(words, start=14):
        assert word in records[line]["error"]["message"], json.dumps(records[line])
    tiny.engine.check()


def test_a_mistake_is_one_line_and_exit_2_before_the_model_loads(tmp_path, capsys):
    command = ["batch", "--model", "no-such-model", "--input", str(tmp_path / "none.jsonl"), "--output", "-"]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "none.jsonl" in captured.err
