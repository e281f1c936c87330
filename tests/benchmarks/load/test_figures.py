# SPDX-License-Identifier: Apache-2.0
"""From arrivals to figures, by hand."""

from types import SimpleNamespace

import pytest

from benchmarks.load.bare_engine import load
from benchmarks.load.figures import Trace, figures, medians, percentile, slope_per_min, spread
from benchmarks.load.server import GAUGES, METRIC, addresses
from benchmarks.load.workload import asks


def test_tokens_that_come_together_take_no_time_but_the_first():
    trace = Trace(0.0, [(1.0, 1), (3.0, 2), (3.5, 1)])
    assert list(trace.gaps_s()) == [2.0, 0.0, 0.5]
    assert list(Trace(0.0, [(1.0, 3)]).gaps_s()) == [0.0, 0.0]


def test_figures_of_two_requests_one_of_them_late():
    traces = [
        Trace(10.0, [(10.5, 1), (10.6, 1), (10.8, 2)], 11.0),
        Trace(10.0, [(11.0, 1), (12.0, 1)], 14.0),
        Trace(10.0, [], 12.0, "UNAVAILABLE"),
    ]
    found = figures(traces, deadline_s=2.0)
    assert (found["first_ms_p50"], found["first_ms_p99"]) == (1000, 1000)
    assert found["between_ms_p99"] == 1000 and found["between_ms_p50"] == 200
    assert found["tokens_per_s"] == 1.5 and found["goodput_tokens_per_s"] == 1.0
    assert found["statuses"] == {"OK": 2, "UNAVAILABLE": 1} and found["requests"] == 3


def test_medians_of_rounds_keep_all_statuses():
    runs = [
        {"a": 1.0, "statuses": {"OK": 2}},
        {"a": 9.0, "statuses": {"OK": 1, "INTERNAL": 1}},
        {"a": None, "statuses": {}},
    ]
    assert medians(runs) == {"a": 5.0, "statuses": {"OK": 3, "INTERNAL": 1}}


def test_percentiles_slopes_and_spreads():
    assert percentile([], 0.5) is None and percentile([3, 1, 2], 0.99) == 3 and percentile([3, 1, 2], 0.0) == 1
    assert slope_per_min([(0, 1), (30, 2), (60, 3)]) == pytest.approx(2) and slope_per_min([(1, 1)]) == 0
    assert spread([2, 2, 2])["jain"] == 1 and spread([4, 0])["jain"] == 0.5 and spread([0])["jain"] == 0


def test_requests_follow_from_their_seed():
    assert asks("1", 5, 100) == asks("1", 5, 100) != asks("2", 5, 100)
    assert all(0 <= token < 100 for ask in asks("1", 50, 100) for token in ask.prompt)


def test_the_gauges_are_found_in_an_exposition():
    text = '# HELP x\nmetrale_kv_blocks{state="used"} 3.0\nmetrale_requests_running 2.0\nother 1\n'
    found = {f"{name}{labels or ''}": float(value) for name, labels, value in METRIC.findall(text)}
    assert {GAUGES[name] for name in found} == {"blocks_used", "running"}


def test_a_server_is_found_in_its_log():
    assert all(addresses(line, "grpc") is None for line in ("plain words\n", '{"message": "x"}', "3"))
    line = '{"message": "serving", "grpc": "127.0.0.1:5", "http": "127.0.0.1:7", "side": "127.0.0.1:6"}'
    assert addresses(line, "grpc") == ("127.0.0.1:5", "http://127.0.0.1:6")
    assert addresses(line, "http") == ("127.0.0.1:7", "http://127.0.0.1:6")


def test_the_bare_engine_has_as_many_requests_at_a_time_as_it_is_told():
    running, most = [], []

    class Answer:
        def __init__(self, prompt, params):
            self.num_generated, self._limit = 0, params.max_tokens
            running.append(self)

        @property
        def finished(self):
            return self.num_generated == self._limit

        def result(self):
            running.remove(self)

    def step():
        most.append(len(running))
        for answer in running:
            answer.num_generated += 1

    job = {"asks": [{"prompt": [1], "max_tokens": limit} for limit in (1, 2, 3, 4, 5)], "streams": 2}
    traces = [Trace(**trace) for trace in load(SimpleNamespace(submit=Answer, step=step), job)["traces"]]
    assert [trace.num_tokens for trace in traces] == [1, 2, 3, 4, 5] and not running
    assert max(most) == 2 and all(trace.ended_s >= trace.arrivals[-1][0] for trace in traces)
