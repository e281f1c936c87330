# SPDX-License-Identifier: Apache-2.0
"""Many streams for many minutes, with all that clients do wrong; and the rules that a server keeps meanwhile."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from benchmarks.load.figures import slope_per_min, spread, table
from benchmarks.load.server import Server
from benchmarks.load.worker import Worker
from benchmarks.load.workload import asks

STREAMS_A_PROCESS = 100
SAMPLE_S = 1.0
SETTLE_S = 30.0
SPREADS = ("finished_a_stream", "tokens_a_stream", "tokens_per_s_a_stream")
EMPTY = ("blocks_used", "running", "waiting", "prefilling")


@dataclass(frozen=True)
class Soak:
    """How many streams for how many seconds, over how many known requests, by which seed; and what a server may grow
    by: threads and open files after it all, resident MiB a minute over the second half."""

    streams: int
    seconds: float
    num_known: int
    seed: int
    max_more_threads: int
    max_more_fds: int
    max_rss_mib_per_min: float


def known_requests(server: Server, soak: Soak) -> list[dict]:
    """Requests with their answers, each asked alone: greedy ones, and every fourth drawn with a seed."""
    vocab_size = server.driver.vocab_size(server.target)
    requests = []
    for number, ask in enumerate(asks(f"{soak.seed}-known", soak.num_known, vocab_size)):
        drawn = {"temperature": 1.0, "seed": number} if number % 4 == 3 else {"temperature": 0}
        params = {"max_tokens": ask.max_tokens, "ignore_eos": True, **drawn}
        requests.append({"prompt": ask.prompt, "params": params})
    answers = server.driver.answers(server.target, requests)
    return [request | answer for request, answer in zip(requests, answers, strict=True)]


def run_soak(soak: Soak, server: Server) -> tuple[dict, list[str]]:
    """The report, and which rules were broken. Prints one JSON line and tables."""
    known = known_requests(server, soak)
    before = server.sample()
    samples: list[dict] = [before]
    over = threading.Event()
    sampler = threading.Thread(target=_watch, args=(server, samples, over))
    started_s = time.monotonic()
    sampler.start()
    try:
        results = _results(soak, server, known)
        wall_s = time.monotonic() - started_s
    finally:
        over.set()
        sampler.join()
    after = settled(server.sample, before, soak)
    tallies = [tally for result in results for tally in result["tallies"]]
    outcomes = sum((Counter(tally["outcomes"]) for tally in tallies), Counter())
    # Under a steady load: not while it begins, nor while the last streams leave.
    half = [sample for sample in samples if soak.seconds / 2 < sample["at_s"] - started_s <= soak.seconds]
    report = {
        "soak": asdict(soak),
        "wall_s": round(wall_s, 1),
        "finished": sum(tally["finished"] for tally in tallies),
        "tokens_per_s": round(sum(tally["tokens"] for tally in tallies) / wall_s, 2),
        "faults": sum(tally["num_faults"] for tally in tallies),
        "outcomes": dict(sorted(outcomes.items())),
        "longest_request_s": round(max(tally["longest_s"] for tally in tallies), 2),
        "finished_a_stream": spread([tally["finished"] for tally in tallies]),
        "tokens_a_stream": spread([tally["tokens"] for tally in tallies]),
        # Of requests that nothing but the server slowed: how evenly it serves.
        "tokens_per_s_a_stream": spread(
            [tally["unhindered_tokens"] / tally["unhindered_s"] for tally in tallies if tally["unhindered_s"]] or [0.0]
        ),
        "silent_samples": sum("silent" in sample for sample in samples),
        "driver_cpu_share": round(sum(result["cpu_s"] for result in results) / wall_s, 3),
        "before": before,
        "after": after,
        "peak": _peaks(samples),
        "rss_mib_per_min": round(slope_per_min([(s["at_s"], s["rss_mib"]) for s in half if "rss_mib" in s]), 3),
        "fault_texts": [text for tally in tallies for text in tally["faults"]][:40],
    }
    broken = broken_rules(report, soak)
    print(json.dumps(report))
    print(_tables(report))
    for sample in (*samples, after):
        sample["at_s"] = round(sample["at_s"] - started_s, 1)
    return {**report, "samples": samples, "broken": broken}, broken


def broken_rules(report: dict, soak: Soak) -> list[str]:
    """What a server must keep and did not, in words."""
    before, after = report["before"], report["after"]
    broken = [f"{report['faults']} faults that nobody provoked"] if report["faults"] else []
    broken += [f"{name}={after[name]:g} with nobody left" for name in EMPTY if after.get(name)]
    for name, limit in (("threads", soak.max_more_threads), ("fds", soak.max_more_fds)):
        if name in after and name in before and after[name] > before[name] + limit:
            broken.append(f"{after[name]} {name} with nobody left, {before[name]} before, {limit} more allowed")
    if report["rss_mib_per_min"] > soak.max_rss_mib_per_min:
        limit = soak.max_rss_mib_per_min
        broken.append(f"memory grew by {report['rss_mib_per_min']} MiB a minute, {limit} allowed")
    if report["silent_samples"] or "silent" in after:
        broken.append(f"{report['silent_samples']} times the server or its metrics were not to be reached")
    if not report["finished_a_stream"]["min"]:
        broken.append("a stream got no whole answer")
    return broken


def settled(sample: Callable[[], dict], before: dict, soak: Soak) -> dict:
    """The first sample that keeps the rules, or the last of `SETTLE_S`: leaving takes a moment."""
    ends_at_s = time.monotonic() + SETTLE_S
    while True:
        found = sample()
        rest = {"faults": 0, "rss_mib_per_min": 0, "finished_a_stream": {"min": 1}, "silent_samples": 0}
        if not broken_rules({**rest, "before": before, "after": found}, soak) or time.monotonic() > ends_at_s:
            return found
        time.sleep(0.2)


def _results(soak: Soak, server: Server, known: Sequence[dict]) -> list[dict]:
    processes = -(-soak.streams // STREAMS_A_PROCESS)
    with ExitStack() as stack:
        settings = {"front": server.front, "target": server.target}
        workers = [stack.enter_context(Worker("soak_clients", settings)) for _ in range(processes)]
        for place, worker in enumerate(workers):
            numbers = list(range(place, soak.streams, processes))
            worker.start({"streams": numbers, "seconds": soak.seconds, "seed": soak.seed, "known": list(known)})
        return [worker.result() for worker in workers]


def _watch(server: Server, samples: list[dict], over: threading.Event) -> None:
    while not over.wait(SAMPLE_S):
        samples.append(server.sample())


def _peaks(samples: Sequence[dict]) -> dict:
    names = {name for sample in samples for name in sample} - {"at_s", "cpu_s"}
    return {name: max(sample[name] for sample in samples if name in sample) for name in sorted(names)}


def _tables(report: dict) -> str:
    names = [name for name in report["peak"]]
    states = [[when, *(report[when].get(name) for name in names)] for when in ("before", "peak", "after")]
    shares = [[name, *report[name].values()] for name in SPREADS]
    parts = [
        table(["", *names], states),
        table(["", *report["tokens_a_stream"]], shares),
        table(["behaviour and outcome", "times"], report["outcomes"].items()),
        f"{report['finished']} answers in {report['wall_s']} s, {report['tokens_per_s']} tokens/s; clients took "
        f"{report['driver_cpu_share']} cores; memory grew by {report['rss_mib_per_min']} MiB a minute in the second "
        f"half; {report['faults']} faults.",
        *(f"- {text}" for text in report["fault_texts"]),
    ]
    return "\n\n".join(parts)
