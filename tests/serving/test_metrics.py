# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads is what happened."""

import json
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from metrale_jax import LLM, SamplingParams
from metrale_jax.engine.stats import EngineStats
from metrale_jax.speculative.policy import DraftStats
from serving.metrics import CONTENT_TYPE, EngineCollector, RequestHistograms, exposition
from tests.conftest import GOLDENS

STATS = EngineStats(
    num_waiting=1,
    num_prefilling=2,
    num_running=3,
    used_blocks=4,
    cached_blocks=5,
    free_blocks=6,
    prompt_tokens=70,
    cached_tokens=7,
    generated_tokens=8,
    num_steps=9,
    num_preemptions=10,
    num_compiles=11,
    num_unreported=12,
    plan_s=0.5,
    launch_s=1.5,
    read_s=2.5,
    uptime_s=13.0,
    recent_tokens_per_s=14.5,
    finished=(("stop", 15), ("length", 16), ("abort", 17), ("error", 18)),
    num_snapshots=19,
    used_snapshots=20,
    snapshots_taken=21,
    snapshot_hits=22,
    snapshots_evicted=23,
    num_swaps=24,
    swapped_bytes=25,
)


def scraped(registry):
    """Samples by name and labels, and the families."""
    families = list(text_string_to_metric_families(exposition(registry).decode()))
    samples = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    return samples, families


def test_each_figure_of_the_engine_has_its_own_name():
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: STATS))
    samples, families = scraped(registry)
    assert samples == {
        ("metrale_requests_waiting",): 1,
        ("metrale_requests_prefilling",): 2,
        ("metrale_requests_running",): 3,
        ("metrale_snapshot_slots",): 19,
        ("metrale_snapshots_used",): 20,
        ("metrale_snapshots_taken_total",): 21,
        ("metrale_snapshot_hits_total",): 22,
        ("metrale_snapshots_evicted_total",): 23,
        ("metrale_swaps_total",): 24,
        ("metrale_swapped_bytes",): 25,
        ("metrale_kv_blocks", "used"): 4,
        ("metrale_kv_blocks", "cached"): 5,
        ("metrale_kv_blocks", "free"): 6,
        ("metrale_prompt_tokens_total",): 70,
        ("metrale_cached_prompt_tokens_total",): 7,
        ("metrale_prefix_cache_hit_ratio",): 0.1,
        ("metrale_generated_tokens_total",): 8,
        ("metrale_steps_total",): 9,
        ("metrale_preemptions_total",): 10,
        ("metrale_programs_compiled_total",): 11,
        ("metrale_unreported_requests_total",): 12,
        ("metrale_step_seconds_total", "plan"): 0.5,
        ("metrale_step_seconds_total", "launch"): 1.5,
        ("metrale_step_seconds_total", "read"): 2.5,
        ("metrale_uptime_seconds",): 13,
        ("metrale_tokens_per_second",): 14.5,
        ("metrale_requests_finished_total", "stop"): 15,
        ("metrale_requests_finished_total", "length"): 16,
        ("metrale_requests_finished_total", "abort"): 17,
        ("metrale_requests_finished_total", "error"): 18,
    }
    assert all(family.documentation.endswith(".") for family in families)
    kinds = {family.name: family.type for family in families}
    assert kinds["metrale_steps"] == "counter" and kinds["metrale_kv_blocks"] == "gauge"
    assert CONTENT_TYPE.startswith("text/plain")


def test_drafts_are_counted_by_their_place_in_a_run():
    positions = ((10, 8), (7, 3))
    drafts = DraftStats(2, 1, (), (), ((0, 1), (2, 10)), positions, 0, 0, 1.0)
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: replace(STATS, drafts=drafts)))
    samples, families = scraped(registry)
    assert samples["metrale_draft_width",] == 2
    for name, column in (("proposed", 0), ("accepted", 1)):
        for place, pair in enumerate(positions, start=1):
            assert samples[f"metrale_drafts_{name}_total", str(place)] == pair[column]
    assert all(family.documentation.endswith(".") for family in families)


def test_counts_of_engines_that_are_gone_stay_and_gauges_are_of_the_one_there_is():
    registry, figures = CollectorRegistry(), EngineCollector()
    registry.register(figures)
    assert scraped(registry)[0] == {}
    steps = {"old": 5, "new": 0}

    def stats_of(name):
        return lambda: replace(STATS, num_steps=steps[name], num_running=steps[name], finished=(("stop", steps[name]),))

    old, new = stats_of("old"), stats_of("new")

    def seen():
        samples, _ = scraped(registry)
        running = samples.get(("metrale_requests_running",))
        return samples["metrale_steps_total",], samples["metrale_requests_finished_total", "stop"], running

    figures.follow(old)
    assert seen() == (5, 5, 5)
    figures.follow(new)
    steps.update(old=7, new=2)
    assert seen() == (9, 9, 2), "both run"
    figures.forget(old)
    steps.update(old=100)
    assert seen() == (9, 9, 2)
    figures.forget(old)
    figures.forget(new)
    assert seen() == (9, 9, None), "counts never go back"


def test_to_register_asks_an_engine_for_nothing():
    def stats():
        raise AssertionError("asked")

    registry = CollectorRegistry()
    registry.register(EngineCollector(stats))
    with pytest.raises(AssertionError, match="asked"):
        exposition(registry)


def test_after_a_real_run_the_scrape_the_log_and_the_results_agree(tmp_path):
    registry, path = CollectorRegistry(), tmp_path / "requests.jsonl"
    llm = LLM(
        GOLDENS / "llama-default",
        max_context_tokens=64,
        max_sequences=1,
        prefill_tokens=16,
        request_log=path,
        on_finish=RequestHistograms(registry),
    )
    registry.register(EngineCollector(llm.stats))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    results = llm.generate(prompts, params)
    cancelled = llm.submit(prompts[0], params)
    cancelled.cancel(llm.engine)
    samples, _ = scraped(registry)
    assert samples["metrale_prompt_tokens_total",] == 8 and samples["metrale_generated_tokens_total",] == 8
    assert samples["metrale_requests_finished_total", "length"] == 2
    assert samples["metrale_requests_finished_total", "abort"] == 1
    assert samples["metrale_programs_compiled_total",] == llm.loaded.steps.num_compiles > 0
    blocks = [samples["metrale_kv_blocks", state] for state in ("used", "cached", "free")]
    assert blocks[0] == 0 and sum(blocks) == llm.engine.memory.num_usable
    times = [result.metrics for result in results]
    for name, values in {
        "queue_seconds": [one.queued_s for one in times],
        "time_to_first_token_seconds": [one.first_token_s for one in times],
        "time_per_output_token_seconds": [(one.finished_s - one.first_token_s) / 3 for one in times],
        "request_seconds": [*(one.finished_s for one in times), cancelled.result().metrics.finished_s],
        "request_prompt_tokens": [3, 5, 3],
        "request_generated_tokens": [4, 4, 0],
    }.items():
        assert samples[f"metrale_{name}_count",] == len(values), name
        assert samples[f"metrale_{name}_sum",] == pytest.approx(sum(values)), name
        assert samples[f"metrale_{name}_bucket", "+Inf"] == len(values), name
    assert samples["metrale_request_prompt_tokens_bucket", "4.0"] == 2
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["finish_reason"] for line in told] == ["length", "length", "abort"]
    by_size = sorted(told[:2], key=lambda line: line["prompt_tokens"])
    for line, result in zip(by_size, results, strict=True):
        assert line["seed"] == result.seed
        assert line["generated_tokens"] == result.usage.generated_tokens
        assert line["first_token_s"] == round(result.metrics.first_token_s, 6)
        assert line["finished_s"] == round(result.metrics.finished_s, 6)
