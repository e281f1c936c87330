# SPDX-License-Identifier: Apache-2.0
"""The engine's figures for Prometheus: `EngineCollector`, `RequestHistograms`, and their `exposition`.

registry = CollectorRegistry()
llm = LLM("smollm2-135m", on_finish=RequestHistograms(registry))
registry.register(EngineCollector(llm.stats))
body, headers = exposition(registry), {"Content-Type": CONTENT_TYPE}
"""

from collections.abc import Callable, Iterator
from threading import Lock

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from metrale_jax.engine.request import Request
from metrale_jax.engine.stats import PHASES, EngineStats
from serving.core.parts import AbstractFigures

__all__ = ["CONTENT_TYPE", "EngineCollector", "RequestHistograms", "exposition"]

# Seconds from a millisecond to ten minutes, and tokens from one to 128 Ki.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = tuple(float(1 << power) for power in range(18))

GAUGES = (
    ("requests_waiting", "Requests in the queue.", "num_waiting"),
    ("requests_prefilling", "Requests whose prompt is being run.", "num_prefilling"),
    ("requests_running", "Requests that generate tokens.", "num_running"),
    ("prefix_cache_hit_ratio", "Share of all prompt tokens so far that were cached.", "hit_rate"),
    ("tokens_per_second", "Generated tokens a second, over the last ten seconds.", "recent_tokens_per_s"),
    ("snapshot_slots", "Recurrent states that can be kept for later prompts.", "num_snapshots"),
    ("snapshots_used", "Recurrent states that are kept.", "used_snapshots"),
    ("swapped_bytes", "Host memory taken by states of preempted requests.", "swapped_bytes"),
    ("uptime_seconds", "Seconds since the engine was made.", "uptime_s"),
)
# The client adds `_total` to each.
COUNTERS = (
    ("prompt_tokens", "Tokens of prompts that began to run, cached ones included.", "prompt_tokens"),
    ("cached_prompt_tokens", "Prompt tokens that were found in the prefix cache.", "cached_tokens"),
    ("generated_tokens", "Tokens generated; a beam search generates one a step.", "generated_tokens"),
    ("steps", "Steps launched.", "num_steps"),
    ("preemptions", "Requests sent back to the queue for want of KV blocks.", "num_preemptions"),
    ("programs_compiled", "Programs compiled.", "num_compiles"),
    ("snapshots_taken", "Recurrent states kept so far.", "snapshots_taken"),
    ("snapshot_hits", "Prompts that went on from a kept recurrent state.", "snapshot_hits"),
    ("snapshots_evicted", "Kept recurrent states that made room for others.", "snapshots_evicted"),
    ("swaps", "Preempted requests whose state was copied to the host.", "num_swaps"),
    ("unreported_requests", "Requests at whose end the hook on_finish raised.", "num_unreported"),
)


class EngineCollector(Collector, AbstractFigures):
    """Asks `stats()`, if it is given, at each scrape; or the engine that was last told to `follow`.

    Gauges are of that engine, and not there where there is none. Counters are sums over all engines so far: they begin
    at zero with the collector and never go back, as Prometheus expects.
    """

    def __init__(self, stats: Callable[[], EngineStats] | None = None):
        self._live: list[Callable[[], EngineStats]] = [] if stats is None else [stats]
        self._past: Counts = {}
        self._lock = Lock()

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        with self._lock:
            self._live.append(stats)

    def forget(self, stats: Callable[[], EngineStats]) -> None:
        with self._lock:
            if stats not in self._live:
                return
            self._live.remove(stats)
            _add(self._past, _counts(stats()))

    def describe(self) -> list[Metric]:
        """Nothing, so that to register asks for no figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of one moment."""
        with self._lock:
            found = [stats() for stats in self._live]
            counts = dict(self._past)
        for stats in found:
            _add(counts, _counts(stats))
        if found:
            yield from _gauges(found[-1])
        families: dict[str, CounterMetricFamily] = {}
        for (name, about, label, value), count in counts.items():
            if name not in families:
                families[name] = CounterMetricFamily(f"metrale_{name}", about, labels=[label] if label else None)
            families[name].add_metric([value] if label else [], count)
        yield from families.values()


# Name, meaning, and a label with its value or two empty texts; how often.
Counts = dict[tuple[str, str, str, str], float]


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    for name, about, field in GAUGES:
        yield GaugeMetricFamily(f"metrale_{name}", about, value=getattr(stats, field))
    blocks = GaugeMetricFamily("metrale_kv_blocks", "KV blocks of the scarcest group, by state.", labels=["state"])
    for state in ("used", "cached", "free"):
        blocks.add_metric([state], getattr(stats, f"{state}_blocks"))
    yield blocks
    if stats.drafts is not None:
        about = "Most drafts of a row at present; 0: none pay."
        yield GaugeMetricFamily("metrale_draft_width", about, value=stats.drafts.width)


def _counts(stats: EngineStats) -> Counts:
    found: Counts = {(name, about, "", ""): getattr(stats, field) for name, about, field in COUNTERS}
    for phase in PHASES:
        found["step_seconds", "Seconds inside steps, by phase.", "phase", phase] = getattr(stats, f"{phase}_s")
    for reason, count in stats.finished:
        found["requests_finished", "Requests ended, by reason.", "reason", reason] = count
    if stats.drafts is not None:
        for name, about, column in (("proposed", "Tokens drafted", 0), ("accepted", "Drafts that stood", 1)):
            for place, pair in enumerate(stats.drafts.positions, start=1):
                found[f"drafts_{name}", f"{about}, by place in a run.", "place", str(place)] = pair[column]
    return found


def _add(sums: Counts, counts: Counts) -> None:
    for key, count in counts.items():
        sums[key] = sums.get(key, 0) + count


class RequestHistograms:
    """Distributions over the requests that ended: an `on_finish` hook. What a request did not reach is not counted."""

    def __init__(self, registry: CollectorRegistry):
        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"metrale_{name}", about, buckets=buckets, registry=registry)

        self._queue = histogram("queue_seconds", "From queued until the prompt began to run.", SECONDS)
        self._first = histogram("time_to_first_token_seconds", "From queued until the first token.", SECONDS)
        self._each = histogram("time_per_output_token_seconds", "Mean time of each token after the first.", SECONDS)
        self._whole = histogram("request_seconds", "From queued until the end.", SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of the prompt.", TOKENS)
        self._generated = histogram("request_generated_tokens", "Tokens of the answer.", TOKENS)

    def __call__(self, request: Request) -> None:
        """Takes in a request that ended."""
        times, num_tokens = request.metrics(), len(request.output)
        if request.started_at:
            self._queue.observe(times.queued_s)
        if request.first_token_at:
            self._first.observe(times.first_token_s)
        if num_tokens > 1:
            self._each.observe((times.finished_s - times.first_token_s) / (num_tokens - 1))
        self._whole.observe(times.finished_s)
        self._prompt.observe(len(request.prompt))
        self._generated.observe(num_tokens)


def exposition(registry: CollectorRegistry) -> bytes:
    """All metrics of `registry` as text for a scrape, of type `CONTENT_TYPE`."""
    return generate_latest(registry)
