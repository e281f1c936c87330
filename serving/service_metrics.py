# SPDX-License-Identifier: Apache-2.0
"""The service's figures for Prometheus: `CallMetrics` of calls that ended, `ServiceCollector` of those under way."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.core.gate import Gate
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.records import CallRecord, ChangeRecord
from serving.metrics import SECONDS

# Values of a label, so that nothing that comes from outside makes series without end.
MAX_METHODS = 64
MAX_KEYS = 4096
OTHERS = "(others)"


class CallMetrics:
    """Counts and distributions over calls that ended: an `Observer`. What a call did not reach is not counted."""

    def __init__(self, registry: CollectorRegistry):
        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"metrale_call_{name}_seconds", about, ["method"], buckets=SECONDS, registry=registry)

        self._calls = Counter("metrale_calls", "Calls ended.", ["method", "outcome"], registry=registry)
        self._tokens = Counter("metrale_key_tokens", "Tokens of calls ended.", ["key", "kind"], registry=registry)
        self._by_key = Counter("metrale_key_calls", "Calls ended.", ["key", "outcome"], registry=registry)
        about = "Models loaded, unloaded and retired, or not."
        self._changes = Counter("metrale_model_changes", about, ["action", "outcome"], registry=registry)
        self._queued = histogram("queue", "From a call's admission until its prompt began to run.")
        self._first = histogram("time_to_first_token", "From a call's arrival until its first token.")
        self._whole = histogram("duration", "From a call's arrival until its end.")
        self._methods, self._keys = _Names(MAX_METHODS), _Names(MAX_KEYS)

    def change(self, record: ChangeRecord) -> None:
        """Takes in a change of models that ended or was refused, or a model that is gone."""
        self._changes.labels(record.action, record.outcome).inc()

    def __call__(self, record: CallRecord) -> None:
        """Takes in a call that ended."""
        method, key = self._methods.known(record.method), self._keys.known(record.key_id)
        self._calls.labels(method, record.outcome).inc()
        self._by_key.labels(key, record.outcome).inc()
        for kind in ("prompt", "cached", "generated"):
            num_tokens = getattr(record, f"{kind}_tokens")
            if num_tokens:
                self._tokens.labels(key, kind).inc(num_tokens)
        if record.queued_s:
            self._queued.labels(method).observe(record.queued_s - record.admitted_s)
        if record.first_token_s:
            self._first.labels(method).observe(record.first_token_s)
        self._whole.labels(method).observe(record.finished_s)


@dataclass(frozen=True, eq=False)
class ServiceCollector(Collector):
    """Asks at each scrape where the server stands, how many calls are open or wait, and how many were turned away."""

    lifecycle: Lifecycle
    meter: Meter
    gate: Gate

    def describe(self) -> list[Metric]:
        """Nothing, so that to register asks for no figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of one moment."""
        now = self.lifecycle.state
        states = GaugeMetricFamily("metrale_server_state", "1 for the state it is in.", labels=["state"])
        for state in State:
            states.add_metric([state.value], float(state is now))
        yield states
        for name, about, value in (
            ("open", "Calls under way.", self.meter.num_open),
            ("waiting", "Calls whose prompt has yet to run.", self.gate.num_waiting),
            ("waiting_tokens", "Tokens of prompts that have yet to run.", self.gate.num_waiting_tokens),
        ):
            yield GaugeMetricFamily(f"metrale_calls_{name}", about, value=value)
        for name, about, value in (
            ("shed", "Calls that the queue had no room for.", self.gate.num_shed),
            ("over_limit", "Calls refused by the limits of their key.", self.meter.num_refused),
        ):
            yield CounterMetricFamily(f"metrale_calls_{name}", about, value=value)


class _Names:
    """The first `max_names` names that were seen; the rest are one."""

    def __init__(self, max_names: int):
        self._seen: set[str] = set()
        self._max_names = max_names

    def known(self, name: str) -> str:
        """The name, or what stands for all later ones."""
        if name not in self._seen:
            if len(self._seen) >= self._max_names:
                return OTHERS
            self._seen.add(name)
        return name
