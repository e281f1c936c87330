# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads of calls is what happened to them, in a bounded number of series."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serving.core.errors import ServiceError
from serving.core.gate import Gate
from serving.core.keys import KeyLimits
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.records import CallRecord, ChangeRecord
from serving.metrics import exposition
from serving.service_metrics import MAX_KEYS, MAX_METHODS, CallMetrics, ServiceCollector

RECORD = CallRecord(
    "Generate",
    "r",
    "alice",
    "p",
    "m",
    "ok",
    prompt_tokens=5,
    cached_tokens=2,
    generated_tokens=3,
    admitted_s=0.25,
    queued_s=0.5,
    first_token_s=0.75,
    finished_s=1.25,
)


def scraped(registry):
    families = list(text_string_to_metric_families(exposition(registry).decode()))
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_each_call_counts_by_method_outcome_and_key():
    registry = CollectorRegistry()
    observer = CallMetrics(registry)
    observer(RECORD)
    observer(replace(RECORD, key_id="bob", generated_tokens=10))
    observer(CallRecord("Embed", "r", "alice", "p", "m", "exhausted", finished_s=0.001))
    samples = scraped(registry)
    assert samples["metrale_calls_total", "Generate", "ok"] == 2
    assert samples["metrale_calls_total", "Embed", "exhausted"] == 1
    assert samples["metrale_key_calls_total", "alice", "exhausted"] == 1
    assert samples["metrale_key_tokens_total", "alice", "prompt"] == 5
    assert samples["metrale_key_tokens_total", "alice", "cached"] == 2
    assert samples["metrale_key_tokens_total", "bob", "generated"] == 10
    assert samples["metrale_call_queue_seconds_sum", "Generate"] == 0.5
    assert samples["metrale_call_time_to_first_token_seconds_sum", "Generate"] == 1.5
    assert samples["metrale_call_duration_seconds_sum", "Generate"] == 2.5
    assert samples["metrale_call_duration_seconds_count", "Embed"] == 1
    assert ("metrale_call_queue_seconds_count", "Embed") not in samples, "its prompt never ran"


def test_names_from_outside_make_no_series_without_end():
    registry = CollectorRegistry()
    observer = CallMetrics(registry)
    for number in range(MAX_KEYS + 100):
        observer(CallRecord(f"m{number}", "r", f"k{number}", "p", "m", "ok"))
    samples = scraped(registry)
    calls = {key: value for key, value in samples.items() if key[0] == "metrale_calls_total"}
    assert len(calls) == MAX_METHODS + 1 and sum(calls.values()) == MAX_KEYS + 100
    keys = {key: value for key, value in samples.items() if key[0] == "metrale_key_calls_total"}
    assert len(keys) == MAX_KEYS + 1 and keys["metrale_key_calls_total", "(others)", "ok"] == 100


def test_changes_of_models_are_counted_by_what_came_of_them():
    registry = CollectorRegistry()
    metrics = CallMetrics(registry)
    for outcome in ("ok", "ok", "forbidden"):
        metrics.change(ChangeRecord("load", "m", outcome=outcome))
    samples = scraped(registry)
    assert samples["metrale_model_changes_total", "load", "ok"] == 2
    assert samples["metrale_model_changes_total", "load", "forbidden"] == 1


def test_what_is_open_waits_and_was_turned_away_is_asked_at_the_scrape():
    registry, lifecycle = CollectorRegistry(), Lifecycle()
    meter = Meter(lambda key: KeyLimits(max_concurrent=1), lambda: 0.0)
    gate = Gate(2, 0, lambda: 0.0)
    registry.register(ServiceCollector(lifecycle, meter, gate))
    meter.admit("a", 5)
    gate.enter(7, None), gate.enter(8, None)
    for refused in (lambda: meter.admit("a", 5), lambda: gate.enter(9, None)):
        with pytest.raises(ServiceError):
            refused()
    lifecycle.move(State.SERVING)
    samples = scraped(registry)
    assert samples["metrale_server_state", "serving"] == 1 and samples["metrale_server_state", "loading"] == 0
    assert samples["metrale_calls_open",] == 1
    assert (samples["metrale_calls_waiting",], samples["metrale_calls_waiting_tokens",]) == (2, 15)
    assert samples["metrale_calls_over_limit_total",] == 1 and samples["metrale_calls_shed_total",] == 1
