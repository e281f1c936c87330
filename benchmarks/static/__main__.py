# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.static`: compile kernels for machines that are not here and hold their figures to limits.

Run it in the environment of `make aot`, which calls it for the quick rows; `--all` takes every row, `--record` writes
`benchmarks/static/<target>.json`, which later runs may not fall behind. Exits 1 if a figure breaks its limit or a
kernel does not compile, 2 if it was asked for what it does not know.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks.static.gates import problems
from benchmarks.static.readers import READERS
from benchmarks.static.rows import ROWS, Row, rows_of
from metrale_jax.aot.targets import PLUGINS, Target, target_for
from metrale_jax.core.errors import MetraleError
from pallas_kernels.dispatch import imported

HERE = Path(__file__).parent
# Kernels of one platform differ little from chip to chip: the quick rows are compiled for one of each.
TARGETS, QUICK_TARGETS = ("h200", "b200", "v5e", "v6e", "v7x"), ("h200", "v6e")
COLUMNS = (
    *("kernels", "registers", "spill_bytes", "shared_bytes", "blocks", "matrix_ops", "wide_share"),
    *("vmem_bytes", "bytes_ratio", "asked_ratio", "layout_ratio", "pool_share"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.static", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--all", action="store_true", help="every row for every target")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--record", action="store_true", help="write what is found into the targets' records")
    parser.add_argument("--jobs", type=int, default=2, help="compiles at a time")
    options = parser.parse_args(arguments)
    try:
        names = options.targets or (TARGETS if options.all else QUICK_TARGETS)
        return sum(_target(target_for(name), options) for name in names) and 1
    except MetraleError as error:
        print(error, file=sys.stderr)
        return 2


def load_record(name: str) -> dict:
    """The record of a target: the compilers that gave it, and figures by row name."""
    path = HERE / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"compilers": {}, "rows": {}}


def _target(target: Target, options: argparse.Namespace) -> int:
    """How many rows of a target fail."""
    start = time.perf_counter()
    rows = [row for row in rows_of(target.name, target.platform) if options.all or row.quick]
    rows = [row for row in rows if options.only in row.name]
    record = load_record(target.name)
    target.devices()
    with ThreadPoolExecutor(options.jobs) as threads:
        found = list(threads.map(lambda row: _row(row, target, record, options.record), rows))
    failures = sum(not good for good, _ in found)
    print(f"{target.name}: {len(rows)} kernels, {failures} failed, {time.perf_counter() - start:.0f} s", flush=True)
    if options.record:
        record["compilers"] = compilers(target)
        record["rows"].update({row.name: figures for row, (_, figures) in zip(rows, found, strict=True) if figures})
        known = {row.name for row in ROWS}
        record["rows"] = {name: record["rows"][name] for name in sorted(record["rows"]) if name in known}
        (HERE / f"{target.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return failures


def compilers(target: Target) -> dict:
    """Versions of what a record depends on."""
    packages = ("jax", "jaxlib", PLUGINS[target.platform].replace("_", "-"), "nvidia-cuda-nvcc")
    return {name: importlib.metadata.version(name) for name in packages}


def _row(row: Row, target: Target, record: dict, recording: bool) -> tuple[bool, dict]:
    """Whether a row keeps to its limits, and its figures; its lines are printed at once, so that threads mix none."""
    try:
        figures = imported(READERS.get(row.impl, READERS[row.platform]))(row, target)
    except jax.errors.JaxRuntimeError as error:
        print(f"{target.name:5} {row.name}  DOES NOT COMPILE\n    {str(error)[:2000]}", flush=True)
        return False, {}
    speaking = problems(row, figures, {} if recording else record["rows"].get(row.name))
    print("\n".join([_line(row, target, figures), *(f"    {problem}" for problem in speaking)]), flush=True)
    return not speaking, figures


def _line(row: Row, target: Target, figures: dict) -> str:
    shown = [f"{name}={_short(figures[name])}" for name in COLUMNS if name in figures]
    return f"{target.name:5} {row.name:60} {' '.join(shown)}"


def _short(value) -> str:
    return "+".join(f"{count}x{name}" for name, count in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
