# SPDX-License-Identifier: Apache-2.0
"""What a front of the service costs over the bare engine, and whether it bears a crowd.

    python -m benchmarks.serving_load --front http --mode sweep --json OUT
    python -m benchmarks.serving_load --front http --mode soak --minutes 10 --streams 200 --json OUT

Starts `metrale-jax serve`, or takes a server that runs: `--target HOST:PORT` of the front, with `--side-url` and
`--pid` for its metrics and its process. Clients are in processes of their own. Prints JSON lines and tables; exits
with 1 where a rule is broken.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path

from benchmarks.load.fronts.registry import FRONTS
from benchmarks.load.server import Server, started
from benchmarks.load.soak import Soak, run_soak
from benchmarks.load.sweep import Sweep, run_sweep
from benchmarks.load.worker import Worker


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["sweep", "soak"], required=True)
    parser.add_argument("--front", choices=list(FRONTS), default="grpc")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of server and bare engine")
    parser.add_argument("--serve-argument", action="append", default=[], help="of the server alone, as in --x=--flag")
    parser.add_argument("--target", help="a server that runs, in the place of starting one")
    parser.add_argument("--side-url", default="", help="where that server has its /metrics")
    parser.add_argument("--pid", type=int, help="that server's process")
    parser.add_argument("--streams", type=int, nargs="+", help="[sweep: 1 8 32 64 128 200; soak: 200]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--rounds", type=int, default=3)
    sweep.add_argument("--requests-a-stream", type=int, default=2)
    sweep.add_argument("--min-requests", type=int, default=16)
    sweep.add_argument("--deadline-s", type=float, default=60.0)
    sweep.add_argument("--no-bare", action="store_true", help="measure the server alone")
    soak = parser.add_argument_group("soak")
    soak.add_argument("--minutes", type=float, default=10.0)
    soak.add_argument("--num-known", type=int, default=24)
    soak.add_argument("--max-more-threads", type=int, default=4)
    soak.add_argument("--max-more-fds", type=int, default=4)
    soak.add_argument("--max-rss-mib-per-min", type=float, default=2.0)
    return parser.parse_args(arguments)


def options_of(pairs: list[str]) -> dict:
    """Options of the engine by name; numbers, true and false are read as such."""
    named = dict(pair.split("=", 1) for pair in pairs)
    return {name: _value(text) for name, text in named.items()}


def _value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def serve_arguments(options: dict) -> list[str]:
    """The same options as flags of the command line."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def main() -> int:
    """Runs a mode; 1 where a rule is broken."""
    arguments = parsed()
    # So that the server and the other processes end with this one.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options = options_of(arguments.option)
    with ExitStack() as stack:
        server = stack.enter_context(
            nullcontext(Server(arguments.front, arguments.target, arguments.side_url, arguments.pid))
            if arguments.target
            else started(arguments.front, arguments.model, [*serve_arguments(options), *arguments.serve_argument])
        )
        if arguments.mode == "sweep":
            settings = {"model": arguments.model, "options": options}
            engine = None if arguments.no_bare else stack.enter_context(Worker("bare_engine", settings))
            report, broken = run_sweep(_sweep(arguments), server, engine)
        else:
            report, broken = run_soak(_soak(arguments), server)
    for rule in broken:
        print(f"broken: {rule}", file=sys.stderr)
    if arguments.json:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "front": arguments.front,
            "mode": arguments.mode,
            "model": arguments.model,
            "options": options,
            "machine": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "commit": _commit(),
            "versions": {package: version(package) for package in ("jax", *server.driver.packages)},
        }
        arguments.json.write_text(json.dumps({**facts, **report}, indent=1) + "\n")
    return 1 if broken else 0


def _commit() -> str:
    asked = ["git", "rev-parse", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def _sweep(arguments: argparse.Namespace) -> Sweep:
    return Sweep(
        streams=arguments.streams or [1, 8, 32, 64, 128, 200],
        rounds=arguments.rounds,
        requests_a_stream=arguments.requests_a_stream,
        min_requests=arguments.min_requests,
        deadline_s=arguments.deadline_s,
        seed=arguments.seed,
    )


def _soak(arguments: argparse.Namespace) -> Soak:
    return Soak(
        streams=(arguments.streams or [200])[0],
        seconds=arguments.minutes * 60,
        num_known=arguments.num_known,
        seed=arguments.seed,
        max_more_threads=arguments.max_more_threads,
        max_more_fds=arguments.max_more_fds,
        max_rss_mib_per_min=arguments.max_rss_mib_per_min,
    )


if __name__ == "__main__":
    sys.exit(main())
