# SPDX-License-Identifier: Apache-2.0
"""Inputs for batches and what the fake model must make of them."""

import json

from serving.batch.records import Origin
from serving.batch.requests import seed_of
from tests.serving.batch.fake import answer_to
from tests.serving.batch.fake_run import main

CHAT = "/v1/chat/completions"


def chat(custom_id, text, **body):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "any", "messages": [{"role": "user", "content": text}], **body},
    }


def mixed(count):
    """Requests of all kinds, every id its own."""
    kinds = [
        lambda i: chat(f"chat-{i}", f"group {i % 7}: say {i}"),
        lambda i: {"id": i, "prompt": f"group {i % 7}: go on from {i}", "temperature": 0},
        lambda i: {"custom_id": f"ids-{i}", "prompt": [i % 7, 1, i]},
        lambda i: {
            "custom_id": f"text-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "any", "prompt": f"group {i % 7}: complete {i}", "n": 2},
        },
    ]
    return [kinds[i % 4](i) for i in range(count)]


def write(path, lines):
    """Writes requests (objects, or raw bytes) as JSON lines."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def read(path):
    """Output lines by input line; every one of them is whole and comes once."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_line = {record["line"]: record for record in records}
    assert len(by_line) == len(records), "an input line was answered twice"
    return by_line


def texts(record):
    """The answers that an output line holds."""
    if "response" in record:
        choices = record["response"]["body"]["choices"]
        return [choice.get("text", choice.get("message", {}).get("content")) for choice in choices]
    return [choice["text"] for choice in record.get("choices", [record])]


def expected_texts(line, request):
    """What the fake answers to the request on `line`."""
    body = request.get("body", request)
    name = "custom_id" if "custom_id" in request else "id"
    seed = seed_of(Origin(line, "body" in request, name, request.get(name)))
    prompt = body.get("messages", body.get("prompt"))
    return [answer_to(prompt, seed + index) for index in range(body.get("n", 1))]


def held_correct(records, requests):
    """Asserts one right line for each request."""
    assert sorted(records) == list(range(1, len(requests) + 1))
    for line, request in enumerate(requests, start=1):
        record = records[line]
        assert record["error"] is None, record
        assert texts(record) == expected_texts(line, request)
        for name in ("id", "custom_id"):
            if name in request:
                assert record[name] == request[name]


def run(source, output, *flags, backend=None):
    """Runs the command in this process; returns its exit status."""
    return main(["--input", str(source), "--output", str(output), "--quiet", *flags], backend)
