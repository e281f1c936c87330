# SPDX-License-Identifier: Apache-2.0
"""The line that a request leaves behind, whichever way it ended."""

import json
from itertools import chain, repeat

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.hooks import in_turn
from metrale_jax.request_log import RequestLog
from metrale_jax.sampling.params import SamplingParams
from tests.engine.engine_world import Job, World

PROMPT = tuple(range(2, 12))


def world_of(log):
    """A world with one slot, so that the second request waits for the first, and nothing beyond."""
    chosen = chain((0, 0, 24, 1, 24, 1, 1, 1, 0), repeat(0))
    world = World(lambda low, high: next(chosen))
    world.engine.on_finish = log
    return world


def job(seed=0, watch=("none", 0), **params):
    return Job(PROMPT, SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params}), (seed,), watch)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_tells_when_what_happened_and_how_much_there_was(tmp_path):
    path = tmp_path / "requests.jsonl"
    world = world_of(RequestLog(path, lambda: 1e9 + world.now))
    world.submit(job(seed=7))
    world.submit(job(seed=8))
    while world.step():
        world.wait(2)
    first, second = lines(path)
    assert first == {
        "request_id": 1,
        "queued_at": "2001-09-09T01:46:41.000+00:00",
        "started_s": 0.0,
        "first_token_s": 2.0,
        "finished_s": 8.0,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "generated_tokens": 4,
        "finish_reason": "length",
        "num_preemptions": 0,
        "seed": 7,
        "error": None,
    }
    assert second["queued_at"] == first["queued_at"]
    assert (second["started_s"], second["cached_tokens"], second["seed"]) == (10.0, 8, 8), (
        "the step after has room for it"
    )
    for line, sent in zip((first, second), world.sent, strict=True):
        metrics = sent.request.metrics()
        assert line["started_s"] == metrics.queued_s
        assert line["first_token_s"] == metrics.first_token_s
        assert line["finished_s"] == metrics.finished_s


def test_what_was_not_reached_is_null_and_an_error_is_named_by_its_class(tmp_path):
    path = tmp_path / "requests.jsonl"
    world = world_of(RequestLog(path))
    world.submit(job(watch=("fails", 2)))
    world.submit(job(deadline_s=3))
    world.submit(job(beam_width=1))
    world.submit(job())
    world.cancel(0)
    world.step()
    world.wait(5)
    world.finish()
    told = {line["request_id"]: line for line in lines(path)}
    ends = [(told[index]["finish_reason"], told[index]["error"]) for index in (1, 2, 3, 4)]
    assert ends == [("error", "RequestError"), ("abort", "RequestError"), ("length", None), ("abort", None)]
    assert (told[1]["generated_tokens"], told[3]["generated_tokens"]) == (2, 4)
    assert told[4]["started_s"] is told[4]["first_token_s"] is None
    assert told[2]["first_token_s"] is None and told[2]["finished_s"] == 5.0
    assert "watch" not in path.read_text(), "nothing of an error but its class, which may quote the answer"


def test_a_hyphen_is_stderr(capsys):
    world = world_of(RequestLog("-"))
    world.submit(job())
    world.finish()
    captured = capsys.readouterr()
    assert captured.out == "" and json.loads(captured.err)["finish_reason"] == "length"


def test_a_log_is_added_to_and_may_be_moved_away(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("{}\n")
    world = world_of(RequestLog(path))
    world.submit(job())
    world.finish()
    assert len(lines(path)) == 2
    path.rename(tmp_path / "old")
    world.submit(job())
    world.finish()
    assert len(lines(path)) == 1


@pytest.mark.parametrize("path", ["/dev/null/log", "."])
def test_a_log_that_cannot_be_written_is_told_at_once(path):
    with pytest.raises(ConfigError, match=r"request_log='.*' cannot be written .*; name a file"):
        RequestLog(path)


def test_a_log_that_fails_later_stops_neither_the_engine_nor_other_listeners(tmp_path, caplog):
    path, ended = tmp_path / "logs" / "requests.jsonl", []
    path.parent.mkdir()
    world = world_of(in_turn(RequestLog(path), ended.append))
    path.unlink()
    path.parent.rmdir()
    world.submit(job())
    world.finish()
    assert len(ended) == world.engine.stats().num_unreported == 1
    assert world.sent[0].request.finish_reason == "length"
    assert "on_finish raised for request 1" in caplog.text
