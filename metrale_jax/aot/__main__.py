# SPDX-License-Identifier: Apache-2.0
"""`python -m metrale_jax.aot`: compile every step for every target with no device, and print a table.

Run it with `JAX_PLATFORMS=cpu`, and for quiet `TPU_WORKER_HOSTNAMES=localhost`, as `make aot` does. Exits 1 if a step
does not compile or does not update its pool in place, 2 if it was asked for what it does not know.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from metrale_jax.aot.compile_steps import Job, StepReport, compile_step
from metrale_jax.aot.shapes import ARGUMENTS, MODELS, StepSizes, model_for
from metrale_jax.aot.targets import TARGETS, target_for
from metrale_jax.core.errors import MetraleError

DEFAULT_TARGETS = ("h200", "v5e", "v6e", "v7x")
# Chips that share a model whose weights leave no room on one: 16 GB of weights on v5e's 16 GB.
SHARDED = {("v5e", "8b"): 4}
HEADER = "target  model  step     chips  seconds  args GB  temp GB  alias GB  in place"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m metrale_jax.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=DEFAULT_TARGETS, help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", nargs="+", default=tuple(ARGUMENTS), help=f"of {', '.join(ARGUMENTS)}")
    parser.add_argument("--jobs", type=int, default=2, help="compiles at a time")
    parser.add_argument("--copies", action="store_true", help="print the largest copies of each step")
    options = parser.parse_args(arguments)
    try:
        jobs = [
            Job(target_for(target), model_for(model), step, SHARDED.get((target, model), 1))
            for model in options.models
            for step in options.steps
            for target in options.targets
        ]
        return _run(jobs, options.jobs, options.copies)
    except MetraleError as error:
        print(error, file=sys.stderr)
        return 2


def _run(jobs: list[Job], num_threads: int, with_copies: bool) -> int:
    start = time.perf_counter()
    for target in {job.target.name: job.target for job in jobs}.values():
        target.devices()
    print(HEADER, flush=True)
    with ThreadPoolExecutor(num_threads) as threads:
        failures = sum(threads.map(lambda job: _report(job, with_copies), jobs))
    print(f"{len(jobs)} steps, {failures} failed, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failures else 0


def _report(job: Job, with_copies: bool) -> int:
    """1 for a failure, 0 for none; prints the step's lines at once, so that threads do not mix theirs."""
    try:
        report = compile_step(job, StepSizes())
    except jax.errors.JaxRuntimeError as error:
        print(f"{_columns(job)}  DOES NOT COMPILE\n    {str(error)[:2000]}", flush=True)
        return 1
    lines = [_line(report), *(f"    {problem}" for problem in report.problems)]
    if with_copies:
        lines += [f"    largest: {copy}" for copy in report.inspection.largest_copies]
    print("\n".join(lines), flush=True)
    return 1 if report.problems else 0


def _columns(job: Job) -> str:
    return f"{job.target.name:7} {job.model.name:6} {job.step:8} {job.num_devices:5}"


def _line(report: StepReport) -> str:
    seconds = report.lower_seconds + report.compile_seconds
    sizes = report.argument_bytes / 1e9, report.temp_bytes / 1e9, report.alias_bytes / 1e9
    figures = f"{seconds:8.1f} {sizes[0]:8.2f} {sizes[1]:8.2f} {sizes[2]:9.2f}"
    return f"{_columns(report.job)} {figures}  {'no' if report.problems else 'yes'}"


if __name__ == "__main__":
    sys.exit(main())
