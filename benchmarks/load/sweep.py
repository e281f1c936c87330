# SPDX-License-Identifier: Apache-2.0
"""Rising concurrency: the server and the bare engine by turns on the same requests, medians of the rounds."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.load.figures import LATE, OK, Trace, figures, medians, table
from benchmarks.load.server import Server
from benchmarks.load.worker import Worker
from benchmarks.load.workload import Ask, asks

STREAMS_A_PROCESS = 100
# Client processes connect before they begin together.
CONNECT_S = 0.5
COMPARED_AT = 32


@dataclass(frozen=True)
class Sweep:
    """What is measured: numbers of streams, rounds of each, requests a stream (`min_requests` at least in all), the
    seconds that a request may take, and the seed."""

    streams: Sequence[int]
    rounds: int
    requests_a_stream: int
    min_requests: int
    deadline_s: float
    seed: int


def served(workers: Sequence[Worker], server: Server, requests: Sequence[Ask], streams: int, deadline_s: float) -> dict:
    """Figures of the server under `streams` at a time, and what share of a core clients and server took."""
    used = workers[: -(-streams // STREAMS_A_PROCESS)]
    starts_at_s = time.monotonic() + CONNECT_S
    before = server.sample()
    for place, worker in enumerate(used):
        share = [asdict(ask) for ask in requests[place :: len(used)]]
        own = len(range(place, streams, len(used)))
        worker.start({"asks": share, "streams": own, "deadline_s": deadline_s, "starts_at_s": starts_at_s})
    results = [worker.result() for worker in used]
    after = server.sample()
    found = figures([Trace(**trace) for result in results for trace in result["traces"]], deadline_s)
    found["driver_cpu_share"] = round(sum(result["cpu_s"] for result in results) / found["wall_s"], 3)
    if "cpu_s" in before:
        found["server_cpu_share"] = round((after["cpu_s"] - before["cpu_s"]) / found["wall_s"], 3)
    return found


def bare(worker: Worker, requests: Sequence[Ask], streams: int, deadline_s: float) -> dict:
    """Figures of the engine alone."""
    worker.start({"asks": [asdict(ask) for ask in requests], "streams": streams})
    return figures([Trace(**trace) for trace in worker.result()["traces"]], deadline_s)


def run_sweep(sweep: Sweep, server: Server, engine: Worker | None) -> tuple[dict, list[str]]:
    """The report, and what was wrong: statuses that nobody provoked. Prints a JSON line a result and a table."""
    vocab_size = server.driver.vocab_size(server.target)
    processes = -(-max(sweep.streams) // STREAMS_A_PROCESS)
    runs: dict[tuple[int, str], list[dict]] = {}
    with ExitStack() as stack:
        clients = {"front": server.front, "target": server.target}
        workers = [stack.enter_context(Worker("sweep_clients", clients)) for _ in range(processes)]
        for turn in range(sweep.rounds + 1):
            # The first is thrown away: a crowd runs once what a first run costs.
            for streams in sweep.streams if turn else [max(sweep.streams)]:
                count = max(sweep.min_requests, streams * (sweep.requests_a_stream if turn else 1))
                requests = asks(f"{sweep.seed}-{turn}-{streams}", count, vocab_size)
                for name in ("served", "bare") if turn % 2 else ("bare", "served"):
                    if name == "served":
                        found = served(workers, server, requests, streams, sweep.deadline_s)
                    elif engine is not None:
                        found = bare(engine, requests, streams, sweep.deadline_s)
                    else:
                        continue
                    if turn:
                        runs.setdefault((streams, name), []).append(found)
    rows = [{"streams": streams, "what": name, **medians(found)} for (streams, name), found in sorted(runs.items())]
    for row in rows:
        print(json.dumps(row))
    print(_table(rows))
    costs = [_cost(runs, streams) for streams in sweep.streams] if engine is not None else []
    for cost in costs:
        print(json.dumps(cost))
        if cost["streams"] == COMPARED_AT:
            print(_sentence(cost))
    wrong = [
        f"{row['what']} at {row['streams']} streams: {count} requests ended with {status}"
        for row in rows
        for status, count in row["statuses"].items()
        if status not in (OK, LATE)
    ]
    samples = [{"streams": streams, "what": name, "runs": found} for (streams, name), found in runs.items()]
    return {"sweep": asdict(sweep), "rows": rows, "costs": costs, "samples": samples}, wrong


def _cost(runs: dict, streams: int) -> dict:
    """What the service adds to a token and takes of the throughput: medians over pairs measured one after the other."""
    pairs = list(zip(runs[streams, "served"], runs[streams, "bare"], strict=True))
    added = {
        f"added_between_{name}": round(
            median(one[f"between_{name}"] - other[f"between_{name}"] for one, other in pairs), 3
        )
        for name in ("ms_p50", "ms_p99")
    }
    ratio = median(one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs)
    return {"streams": streams, **added, "throughput_ratio": round(ratio, 4)}


def _sentence(cost: dict) -> str:
    percent = 100 * (1 - cost["throughput_ratio"])
    return (
        f"At {cost['streams']} streams the service adds {cost['added_between_ms_p99']:.2f} ms to the time between "
        f"tokens at p99 ({cost['added_between_ms_p50']:.2f} ms at p50) and takes {percent:.1f} % of the throughput."
    )


def _table(rows: Sequence[dict]) -> str:
    shown = {
        "streams": "streams",
        "what": "",
        "first_ms_p50": "first token, ms p50",
        "first_ms_p99": "p99",
        "between_ms_p50": "between tokens, ms p50",
        "between_ms_p99": "p99",
        "tokens_per_s": "tokens/s",
        "goodput_tokens_per_s": "goodput, tokens/s",
        "driver_cpu_share": "clients, cores",
        "server_cpu_share": "server, cores",
    }
    errors = [{status: count for status, count in row["statuses"].items() if status != OK} for row in rows]
    return table(
        [*shown.values(), "errors"],
        [
            [
                *(row.get(name) for name in shown),
                " ".join(f"{status} {count}" for status, count in bad.items()) or "none",
            ]
            for row, bad in zip(rows, errors, strict=True)
        ],
    )
