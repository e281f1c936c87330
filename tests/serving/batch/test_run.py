# SPDX-License-Identifier: Apache-2.0
"""What a batch makes of its lines, with a fake model."""

import json
import subprocess
import sys

import pytest

from metrale_jax.results import GenerationResult, RequestMetrics, Usage
from metrale_jax.sampling.params import SamplingParams
from serving.batch import jsonl
from serving.batch import requests as requests_module
from serving.batch.records import Origin, Told, plain_record
from serving.batch.run import Settings, run_batch
from serving.batch.signals import StopWish
from serving.batch.sink import DirectSink
from tests.serving.batch.fake import MAX_PROMPT, FakeBackend
from tests.serving.batch.inputs import chat, held_correct, mixed, read, run, write


def test_every_line_is_answered_once_in_its_own_form(tmp_path):
    requests = mixed(200)
    output = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "in.jsonl", requests), output) == 0
    records = read(output)
    held_correct(records, requests)
    answer = records[1]
    assert answer["id"] == "batch_req_000000000001" and answer["response"]["status_code"] == 200
    body = answer["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "fake"
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert records[4]["response"]["body"]["object"] == "text_completion"
    assert records[3]["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "generated_tokens": 2}
    assert records[3]["finish_reason"] == "stop" and records[3]["token_ids"] == [1, 2]


# Deeper than what Python spells out, whether or not than what it reads.
DEEP = b"[" * 30_000 + b"]" * 30_000
BAD = [
    (b'{"prompt": "torn', "invalid_json", "no JSON"),
    (b"[" * 100_000, "invalid_json", "no JSON"),
    (b"[1, 2]", "invalid_json", "list"),
    (b'{"prompt": "\xff"}', "invalid_json", "UTF-8"),
    (b'{"prompt": "\\ud800 half"}', "invalid_json", "surrogate"),
    (b'{"id": "e1"}', "invalid_request", "neither a prompt nor"),
    (b'{"id": true, "prompt": "a"}', "invalid_request", "id=True"),
    (b'{"id": "e2", "custom_id": "e3", "prompt": "a"}', "invalid_request", "both id and custom_id"),
    (b'{"id": "e4", "prompt": ""}', "invalid_request", "empty"),
    (b'{"id": "e5", "prompt": [1, "a"]}', "invalid_request", "'a'"),
    (b'{"id": "e6", "prompt": {"a": 1}}', "invalid_request", "neither a text nor"),
    (b'{"id": "e7", "prompt": "a", "temprature": 1}', "invalid_request", "temprature"),
    (b'{"id": "e8", "prompt": "a", "top_p": 7}', "invalid_request", "top_p=7"),
    (b'{"id": "e9", "prompt": "a", "n": 1000}', "invalid_request", "n=1000"),
    (json.dumps({"id": "e10", "prompt": "a" * (MAX_PROMPT + 1)}).encode(), "invalid_request", "no room"),
    (b'{"custom_id": "e11", "method": "POST", "url": "/v1/embeddings", "body": {}}', "invalid_request", "embeddings"),
    (b'{"custom_id": "e12", "method": "GET", "url": "/v1/completions", "body": {}}', "invalid_request", "GET"),
    (b'{"custom_id": "e13", "method": "POST", "url": "/v1/completions"}', "invalid_request", "body"),
    (b'{"custom_id": "e14", "url": "/v1/completions", "body": {"stream": true}}', "invalid_request", "stream"),
    (b'{"custom_id": "e15", "url": "/v1/completions", "body": {}, "x": 1}', "invalid_request", "x is no field"),
    (b'{"url": "/v1/completions", "body": {"prompt": "a"}}', "invalid_request", "custom_id=None"),
    (json.dumps(chat("e16", "a", tools=[{}])).encode(), "invalid_request", "tools"),
    (b'{"id": "e17", "prompt": "a", "temperature": 1%s}' % (b"0" * 400), "invalid_request", "temperature=1000"),
    (b'{"id": "e18", "prompt": "a", "deadline_s": 1%s}' % (b"0" * 400), "invalid_request", "deadline_s=1000"),
    (b'{"id": "e19", "prompt": "a", "json_schema": "%s"}' % (b"[" * 60_000), "invalid_request", "is not JSON"),
    (b'{"id": "e20", "prompt": "a", "stop": %s}' % DEEP, "", "stop="),
    (b'{"id": "e21", "prompt": "a", "json_schema": {"a": %s}}' % DEEP, "", "json_schema="),
    (b'{"id": %s, "prompt": "a"}' % DEEP, "", "id="),
    (json.dumps(chat("e23", "a", logprobs=[])).encode().replace(b"[]", DEEP), "", "logprobs="),
]


@pytest.mark.parametrize("fault", [ValueError("x"), TypeError("x"), RecursionError("x"), OverflowError("x")])
def test_a_fault_that_no_check_foresaw_costs_only_its_line(tmp_path, monkeypatch, fault):
    read_params = requests_module.sampling_params

    def spoilt(asked, defaults):
        if asked.pop("top_k", 0) == 13:
            raise fault
        return read_params(asked, defaults)

    monkeypatch.setattr(requests_module, "sampling_params", spoilt)
    output = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "in.jsonl", [{"prompt": "a", "top_k": 13}, {"prompt": "b"}]), output) == 0
    records = read(output)
    assert type(fault).__name__ in records[1]["error"]["message"] and records[2]["error"] is None


def test_answers_of_a_beam_search_say_how_they_were_ranked():
    def answer(score, others=()):
        metrics = RequestMetrics(0, 0, 0, 0)
        return GenerationResult("a", (1,), (), "stop", Usage(1, 0, 1), metrics, 0, others=others, score=score)

    told = Told("fake", 0, lambda token: b"")
    record = plain_record(Origin(1, openai=False), answer(-0.5, (answer(-1.5),)), told)
    assert record["score"] == -0.5 and [choice["score"] for choice in record["choices"]] == [-0.5, -1.5]
    assert "score" not in plain_record(Origin(1, openai=False), answer(None), told)


def test_a_bad_line_becomes_an_error_line_and_the_rest_goes_on(tmp_path):
    good = mixed(40)
    lines = good + [line for line, _, _ in BAD] + good[:1] + [{"prompt": "no id"}, b"", {"prompt": "no id"}]
    output = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "in.jsonl", lines), output) == 0
    records = read(output)
    held_correct({line: records.pop(line) for line in range(1, 41)}, good)
    for line, (raw, code, words) in enumerate(BAD, start=41):
        error = records[line]["error"]
        if "no JSON" not in error["message"] or code:
            assert error["code"] in (code or "invalid_request",) and words in error["message"], (raw[:99], error)
        assert "text" not in records[line] and records[line].get("response") is None
    assert [records[line].get("id") for line in (46, 49, 55)] == ["e1", "e4", "e10"]
    assert records[56]["custom_id"] == "e11"
    after = 41 + len(BAD)
    twice = records[after]
    assert twice["error"]["code"] == "duplicate_id" and "'chat-0' is taken by line 1" in twice["error"]["message"]
    assert twice["custom_id"] is None, "the id keeps the one line that answers it"
    assert records[after + 1]["error"] is None and records[after + 3]["error"] is None
    assert after + 2 not in records, "an empty line is no request"


def test_a_line_without_end_is_refused_unread(tmp_path, monkeypatch):
    for module in (jsonl, requests_module):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    long = [b'{"prompt": "a"}' + b" " * size for size in (900, 999, 1001, 2002, 50_000)]
    source = write(tmp_path / "in.jsonl", [line for each in long for line in (each, {"prompt": "b"})])
    source.write_bytes(source.read_bytes() + b"x" * 3000)
    assert run(source, tmp_path / "out.jsonl") == 0
    records = read(tmp_path / "out.jsonl")
    refused = [line for line, record in records.items() if record["error"]]
    assert len(records) == 11 and sorted(refused) == [3, 5, 7, 9, 11]
    assert all("longer than 1000 bytes" in records[line]["error"]["message"] for line in refused)


def test_answers_come_in_the_order_of_the_input_if_asked(tmp_path):
    requests = mixed(300)
    source = write(tmp_path / "in.jsonl", [*requests[:5], b"", *requests[5:], b""])
    assert run(source, tmp_path / "any.jsonl") == 0
    assert run(source, tmp_path / "ordered.jsonl", "--order", "input", "--window", "64") == 0
    ordered, as_finished = read(tmp_path / "ordered.jsonl"), read(tmp_path / "any.jsonl")
    assert list(ordered) == sorted(ordered) and list(as_finished) != sorted(as_finished)
    for record in [*ordered.values(), *as_finished.values()]:
        if record.get("response"):
            record["response"]["body"].pop("created")
    assert ordered == as_finished


def test_a_seed_comes_of_the_id_unless_one_is_given(tmp_path):
    lines = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "c", "prompt": "x", "seed": 7}]
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == 0
    assert run(write(tmp_path / "turned.jsonl", lines[::-1]), tmp_path / "again.jsonl") == 0
    first = {record["id"]: record["seed"] for record in read(tmp_path / "out.jsonl").values()}
    again = {record["id"]: record["seed"] for record in read(tmp_path / "again.jsonl").values()}
    assert first == again
    assert first["c"] == 7 and len(set(first.values())) == 3


def test_flags_hold_where_a_line_does_not_say(tmp_path):
    seen = []

    class Watching(FakeBackend):
        def submit(self, prompt, params):
            seen.append(params)
            return super().submit(prompt, params)

    lines = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b", "max_tokens": 5}, chat("3", "c"), chat("4", "d", n=2)]
    source = write(tmp_path / "in.jsonl", lines)
    assert run(source, tmp_path / "out.jsonl", "--max-tokens", "9", "--top-k", "4", backend=Watching()) == 0
    assert [params.max_tokens for params in seen] == [9, 5, 9, 9]
    assert {params.top_k for params in seen} == {4}
    seen.clear()
    assert run(source, tmp_path / "plain.jsonl", backend=Watching()) == 0
    assert [params.max_tokens for params in seen] == [SamplingParams().max_tokens, 5, None, None]


def test_prompts_with_a_common_prefix_run_side_by_side(tmp_path):
    backend = FakeBackend()
    submitted = []
    backend.submit = lambda prompt, params: submitted.append(prompt) or FakeBackend.submit(backend, prompt, params)
    lines = [{"prompt": f"{'ABC'[i % 3]} document, question {i:03}"} for i in range(60)]
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", "--window", "30", backend=backend) == 0
    assert len(submitted) == 60
    for window in (submitted[:30], submitted[30:]):
        assert window == sorted(window)
    assert {prompt[-3:] for prompt in submitted[:30]} == {f"{i:03}" for i in range(30)}, "a window bounds the sorting"


def test_requests_in_flight_are_bounded_and_plenty(tmp_path):
    backend = FakeBackend(max_in_flight=16)
    lines = [{"prompt": f"{i}", "n": 1 + i % 3} for i in range(200)]
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", backend=backend) == 0
    assert 5 <= backend.most_flying <= 16


class Held:
    """A source that knows how far it was read, and a target that keeps nothing."""

    total, identity, min_rows = None, {}, 1

    def __init__(self, lines):
        self._lines, self.read, self.written = lines, 0, 0

    def rows(self):
        for line in range(1, self._lines + 1):
            self.read = line
            yield line, b'{"prompt": "p%d"}' % line

    def recover(self):
        return iter(())

    def append(self, texts):
        self.written += len(texts)

    def sync(self):
        pass

    def close(self):
        pass


def test_a_straggler_does_not_let_the_batch_run_far_ahead():
    lines = Held(2000)
    backend = FakeBackend(max_in_flight=8)
    stuck = []

    def submit(prompt, params):
        ticket = FakeBackend.submit(backend, prompt, params)
        if prompt == "p1":
            ticket.steps = 10**9
            stuck.append(ticket)
        return ticket

    def on_step():
        furthest.append(lines.read)
        if len(furthest) == 400:
            stuck[0].steps = 1

    furthest: list[int] = []
    backend.submit, backend._on_step = submit, on_step
    settings = Settings({}, Told("fake", 0, backend.token_bytes), window=20, max_windows=4)
    tally = run_batch(lines, DirectSink(lines), backend, settings, StopWish(), lambda *_: None)
    assert tally.complete and lines.written == 2000
    assert max(furthest[:399]) <= 1 + 4 * 20 + 2 * 20, "what is held must be bounded"


def test_a_stream_comes_in_and_goes_out(tmp_path):
    requests = mixed(50)
    source = write(tmp_path / "in.jsonl", requests)
    command = [sys.executable, "-m", "tests.serving.batch.fake_run", "--input", "-", "--output", "-", "--quiet"]
    done = subprocess.run(command, input=source.read_bytes(), capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr
    (tmp_path / "out.jsonl").write_bytes(done.stdout)
    held_correct(read(tmp_path / "out.jsonl"), requests)


def test_the_bar_shows_tokens_a_second_and_the_time_left(tmp_path):
    source = write(tmp_path / "in.jsonl", mixed(200))
    command = [sys.executable, "-m", "tests.serving.batch.fake_run", "--step-ms", "4", "--in-flight", "4"]
    arguments = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == ""
    shown = done.stderr.split("\r")
    assert any("tokens/s" in part and "/200" in part and "<" in part for part in shown), done.stderr
    assert "[200 lines done; this run answered 200, refused 0; 500 tokens in" in done.stderr


def resident_kib(tmp_path, count, *flags):
    source = tmp_path / f"in-{count}.jsonl"
    with open(source, "w") as file:
        for i in range(count):
            file.write(f'{{"custom_id": "a rather long name of a request, number {i}", "prompt": "say {i * 7919}"}}\n')
    command = [sys.executable, "-m", "tests.serving.batch.fake_run", "--memory", "--quiet", *flags]
    arguments = ["--input", str(source), "--output", str(tmp_path / f"out-{count}.jsonl")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_does_not_grow_with_the_input(tmp_path):
    flags = ["--window", "500", "--order", "input"]
    small = resident_kib(tmp_path, 2_000, *flags)
    assert resident_kib(tmp_path, 30_000, *flags) < small + 5_000, "4 MiB are the cache of ids"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["any", "input"])
def test_a_million_lines_take_the_memory_of_ten_thousand_and_so_does_going_on(tmp_path, order):
    small = resident_kib(tmp_path, 10_000, "--order", order)
    assert resident_kib(tmp_path, 1_000_000, "--order", order) < small + 8_000
    with open(tmp_path / "out-1000000.jsonl", "r+b") as output:
        output.truncate(output.seek(0, 2) - 1000)
    assert resident_kib(tmp_path, 1_000_000, "--order", order) < small + 8_000
    with open(tmp_path / "out-1000000.jsonl", "rb") as output:
        assert len({json.loads(line)["line"] for line in output}) == 1_000_000
