# SPDX-License-Identifier: Apache-2.0
"""A line for everything, nothing that was said in any, and nobody waits for a reader."""

import json
import logging
import os
import threading

import pytest

from serving.core.errors import Kind
from serving.core.journal import MAX_FIELD_CHARS, Journal, write_all
from serving.core.records import CallRecord

RECORD = CallRecord(
    method="Generate",
    request_id="r-1",
    key_id="alice",
    peer="ipv4:127.0.0.1:5",
    model="m",
    outcome="ok",
    finish_reasons=("stop", "length"),
    prompt_tokens=5,
    cached_tokens=2,
    generated_tokens=3,
    admitted_s=0.25,
    queued_s=0.5,
    first_token_s=0.75,
    finished_s=1.25,
    prompt_text="secret words",
)
EVIL = 'x\n{"event":"forged"}\r\x1b[2J\x00\x85\u2028\u202e"\udcff\t=é'


def lines_of(use, form="json", log_prompts=False):
    written = []
    journal = Journal(written.append, form, log_prompts, lambda: 1e9 + 0.5)
    use(journal)
    assert journal.close(10)
    return b"".join(written)


def test_a_call_is_a_line_with_all_that_is_known_of_it_but_what_was_said():
    written = lines_of(lambda journal: journal(RECORD))
    assert json.loads(written) == {
        "time": "2001-09-09T01:46:40.500+00:00",
        "level": "info",
        "event": "call",
        "method": "Generate",
        "request_id": "r-1",
        "key": "alice",
        "peer": "ipv4:127.0.0.1:5",
        "model": "m",
        "outcome": "ok",
        "finish_reasons": ["stop", "length"],
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "generated_tokens": 3,
        "admitted_s": 0.25,
        "queued_s": 0.5,
        "first_token_s": 0.75,
        "finished_s": 1.25,
    }


@pytest.mark.parametrize("kind", list(Kind))
def test_what_an_error_quotes_is_told_only_where_prompts_are(kind):
    record = CallRecord(
        "Generate", "r", "k", "p", "m", kind.value, detail="secret words", field="params.stop", prompt_text="secret"
    )
    told = json.loads(lines_of(lambda journal: journal(record)))
    quotes = kind in (Kind.INVALID, Kind.NOT_FOUND, Kind.INTERNAL)
    assert (told["outcome"], told["field"]) == (kind.value, "params.stop")
    assert ("secret" in json.dumps(told)) is not quotes and "prompt" not in told
    whole = json.loads(lines_of(lambda journal: journal(record), log_prompts=True))
    assert (whole["detail"], whole["prompt"]) == ("secret words", "secret")


@pytest.mark.parametrize("form", ["json", "text"])
def test_nothing_that_a_caller_sends_makes_a_line(form):
    record = CallRecord(EVIL, EVIL, EVIL, EVIL, EVIL, "ok", detail=EVIL, finish_reasons=(EVIL,), prompt_text=EVIL)

    def use(journal):
        journal(record)
        journal.event("started", name=EVIL, names=[EVIL])

    written = lines_of(use, form, log_prompts=True)
    lines = written.decode("ascii").splitlines()
    assert len(lines) == 2 and all(32 <= byte < 127 or byte == 10 for byte in written)
    if form == "json":
        assert json.loads(lines[1])["name"] == EVIL and json.loads(lines[0])["prompt"] == EVIL
    assert all(line.count("event") <= 1 or "\\n" in line for line in lines)


def test_text_is_for_reading():
    written = lines_of(lambda journal: journal.event("listening", address="127.0.0.1:5", about="two words"), "text")
    assert written == b'2001-09-09T01:46:40.500+00:00 info listening address=127.0.0.1:5 about="two words"\n'


def test_long_texts_are_cut():
    told = json.loads(lines_of(lambda journal: journal.event("a", name="x" * 10_000)))
    assert len(told["name"]) == MAX_FIELD_CHARS and told["name"].endswith("...")


def test_lines_that_nobody_reads_are_dropped_and_counted_and_nobody_waits():
    free, begun, written = threading.Event(), threading.Event(), []

    def write(line):
        begun.set()
        assert free.wait(30)
        written.append(json.loads(line))

    journal = Journal(write, "json", False, lambda: 0.0, max_pending_bytes=1000)
    journal.event("first")
    assert begun.wait(30)
    for number in range(100):
        journal.event("more", number=number)
    free.set()
    assert journal.close(10)
    events = [line["event"] for line in written]
    assert events[0] == "first" and events.count("lines_dropped") == 1
    (dropped,) = (line["count"] for line in written if line["event"] == "lines_dropped")
    assert dropped + events.count("more") == 100 and dropped > 50


def test_a_pipe_that_stays_full_keeps_nobody():
    reading, writing = os.pipe()
    journal = Journal(lambda line: write_all(writing, line), "json", False, lambda: 0.0)
    try:
        for _ in range(1000):
            journal.event("a", text="x" * 500)
        assert not journal.close(0.05), "and it says so"
    finally:
        os.close(reading)
        assert journal.close(10)
        os.close(writing)


def test_a_pipe_that_was_closed_keeps_nobody():
    reading, writing = os.pipe()
    os.close(reading)
    journal = Journal(lambda line: write_all(writing, line), "json", False, lambda: 0.0)
    for _ in range(10):
        journal.event("a")
    assert journal.close(10)
    os.close(writing)


def test_a_descriptor_that_does_not_block_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = bytes(1 << 20)
    thread = threading.Thread(target=write_all, args=(writing, data))
    thread.start()
    got = 0
    while got < len(data):
        got += len(os.read(reading, 1 << 16))
    thread.join(10)
    assert not thread.is_alive()
    os.close(reading), os.close(writing)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_libraries_log_here_too_and_their_exceptions_quote_nothing(log_prompts):
    def use(journal):
        logger = logging.Logger("somewhere")
        logger.addHandler(journal.handler())
        logger.debug("unheard")
        logger.warning("beware of %s", "dogs")
        try:
            raise ValueError("secret words")
        except ValueError:
            logger.exception("it raised")

    first, second = (json.loads(line) for line in lines_of(use, log_prompts=log_prompts).splitlines())
    assert (first["event"], first["level"], first["logger"]) == ("log", "warning", "somewhere")
    assert first["message"] == "beware of dogs"
    assert second["exception"] == "ValueError" and "test_journal.py" in second["frames"][-1]
    assert ("secret words" in json.dumps(second)) is log_prompts
