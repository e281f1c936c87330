# SPDX-License-Identifier: Apache-2.0
"""The engine's figures for Prometheus: `EngineCollector`, `RequestHistograms`, and their `exposition`.

registry = CollectorRegistry()
llm = LLM("smollm2-135m", on_finish=RequestHistograms(registry))
registry.register(EngineCollector(llm.stats))
body, headers = exposition(registry), {"Content-Type": CONTENT_TYPE}
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from metrale_jax.engine.request import Request
from metrale_jax.engine.stats import PHASES, EngineStats
from metrale_jax.speculative.policy import DraftStats

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


class EngineCollector(Collector):
    """Asks `stats()` at each scrape. An engine's counters begin at zero with it, as Prometheus expects."""

    def __init__(self, stats: Callable[[], EngineStats]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing, so that to register asks for no figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of one moment."""
        stats = self._stats()
        for name, about, field in GAUGES:
            yield GaugeMetricFamily(f"metrale_{name}", about, value=getattr(stats, field))
        for name, about, field in COUNTERS:
            yield CounterMetricFamily(f"metrale_{name}", about, value=getattr(stats, field))
        blocks = GaugeMetricFamily("metrale_kv_blocks", "KV blocks of the scarcest group, by state.", labels=["state"])
        for state in ("used", "cached", "free"):
            blocks.add_metric([state], getattr(stats, f"{state}_blocks"))
        yield blocks
        seconds = CounterMetricFamily("metrale_step_seconds", "Seconds inside steps, by phase.", labels=["phase"])
        for phase in PHASES:
            seconds.add_metric([phase], getattr(stats, f"{phase}_s"))
        yield seconds
        finished = CounterMetricFamily("metrale_requests_finished", "Requests ended, by reason.", labels=["reason"])
        for reason, count in stats.finished:
            finished.add_metric([reason], count)
        yield finished
        if stats.drafts is not None:
            yield from _of_drafts(stats.drafts)


def _of_drafts(drafts: DraftStats) -> Iterator[Metric]:
    """What is known of drafts, where an engine makes any."""
    yield GaugeMetricFamily("metrale_draft_width", "Most drafts of a row at present; 0: none pay.", value=drafts.width)
    for name, about, column in (("proposed", "Tokens drafted.", 0), ("accepted", "Drafts that stood.", 1)):
        family = CounterMetricFamily(f"metrale_drafts_{name}", f"{about[:-1]}, by place in a run.", labels=["place"])
        for place, pair in enumerate(drafts.positions, start=1):
            family.add_metric([str(place)], pair[column])
        yield family


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
