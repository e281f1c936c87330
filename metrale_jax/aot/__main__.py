# SPDX-License-Identifier: Apache-2.0
"""`python -m metrale_jax.aot`: compile every step for every target with no device, and print a table.

Run it with `JAX_PLATFORMS=cpu`, and for quiet `TPU_WORKER_HOSTNAMES=localhost`, as `make aot` does. Exits 1 if a step
does not compile, does not update its pool in place or lets devices tell each other what was not intended, 2 if it was
asked for what it does not know.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import jax

from metrale_jax.aot.chips import CHIPS
from metrale_jax.aot.compile_steps import Job, StepReport, compile_step
from metrale_jax.aot.shapes import ARGUMENTS, MODELS, ModelCase, StepSizes, model_for, num_bytes
from metrale_jax.aot.targets import COUNTS, Target, target_for
from metrale_jax.core.errors import MetraleError

TARGETS = ("h200", "v5e", "v6e", "v7x")
# Models, steps and targets that are compiled unless asked otherwise, some minutes of work; a model that needs several
# devices gets them.
DEFAULTS = (
    (("small",), tuple(ARGUMENTS), ("h200", "v6e")),
    (("small",), ("advance",), ("v5e", "v7x")),
    (("llama-3.1-8b", "qwen3-8b", "qwen3-32b", "gemma-3-27b"), ("decode",), ("h200", "v6e")),
    (("llama-3.1-8b",), ("decode",), ("v5e",)),
    (("qwen3-32b",), ("decode", "mixed"), ("h200-8", "v6e-8")),
    (("olmo-hybrid-7b", "nemotron-h-8b"), ("decode", "mixed"), ("h200",)),
    (("small+ngram", "small+self", "small+mtp", "small+eagle3"), ("speculate",), ("h200", "v6e")),
    (("small+eagle3",), ("advance",), ("h200", "v6e")),
)
# What a step's arguments may take of a device's memory.
ROOM = 0.85
HEADER = "target  model         layers  step     seconds  args GB  temp GB  alias GB  sums  as intended"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m metrale_jax.aot", description=__doc__.splitlines()[0])
    chips = f"of {', '.join(CHIPS)}, alone or as v6e-8 for eight devices"
    parser.add_argument("--targets", nargs="+", help=chips)
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", nargs="+", help=f"of {', '.join(ARGUMENTS)}")
    parser.add_argument("--full", action="store_true", help="every layer of the models, not a few of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="compiles at a time")
    parser.add_argument("--copies", action="store_true", help="print the largest copies and all that devices tell")
    options = parser.parse_args(arguments)
    try:
        jobs = [_job(*combination, options.full) for combination in _combinations(options)]
        return _run(jobs, options.jobs, options.copies)
    except MetraleError as error:
        print(error, file=sys.stderr)
        return 2


def _combinations(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(model, step, target) of all that is asked for; what is not narrowed down is everything of its kind."""
    if not (options.models or options.steps or options.targets):
        return [found for table in DEFAULTS for found in product(*table)]
    return list(product(options.models or MODELS, options.steps or ARGUMENTS, options.targets or TARGETS))


def _job(model: str, step: str, target: str, full: bool) -> Job:
    case = model_for(model)
    return Job(roomy(target_for(target), case), case if full else case.cut(), step)


def roomy(target: Target, model: ModelCase) -> Target:
    """The target, or if a device alone lacks the room for a whole model and its pool, as many as have it."""
    if target.num_devices > 1:
        return target
    needed = num_bytes(model)
    counts = [count for count in COUNTS if needed <= count * target.chip.usable_memory * ROOM]
    return Target(target.chip, counts[0] if counts else COUNTS[-1])


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
        lines += [f"    {count} x {told}" for told, count in Counter(map(str, report.collectives)).items()]
        lines += [f"    largest: {copy}" for copy in report.inspection.largest_copies]
    print("\n".join(lines), flush=True)
    return 1 if report.problems else 0


def _columns(job: Job) -> str:
    layers = job.model.values["num_hidden_layers"]
    return f"{job.target.name:7} {job.model.name:13} {layers:6}  {job.step:8}"


def _line(report: StepReport) -> str:
    seconds = report.lower_seconds + report.compile_seconds
    sizes = report.argument_bytes / 1e9, report.temp_bytes / 1e9, report.alias_bytes / 1e9
    figures = f"{seconds:8.1f} {sizes[0]:8.2f} {sizes[1]:8.2f} {sizes[2]:9.2f}"
    sums = sum(1 for told in report.collectives if told.opcode == "all-reduce")
    return f"{_columns(report.job)} {figures} {sums:5}  {'no' if report.problems else 'yes'}"


if __name__ == "__main__":
    sys.exit(main())
