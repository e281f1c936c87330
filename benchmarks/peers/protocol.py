# SPDX-License-Identifier: Apache-2.0
"""What every peer script shares: its arguments, and the one JSON line that it prints for each figure.

Runs in the interpreters of the engines compared, so it needs the standard library alone. A peer script hands over its
name and a function that loads a model; the tasks are then the same for all.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks import (
    MEMORY_SEQUENCES,
    OFFLINE_ANSWERS,
    OFFLINE_PROMPTS,
    OFFLINE_REQUESTS,
    PREFIX_TOKENS,
    TAIL_TOKENS,
    TASKS,
    Loaded,
)


@dataclass(frozen=True)
class Setup:
    """What a load function is told: files, a directory for compiled programs, and the largest shapes to come."""

    model: Path
    cache_dir: Path | None
    max_sequences: int
    context_tokens: int
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One result. `detail` holds its samples and what else explains it."""

    peer: str
    figure: str
    value: float
    unit: str
    detail: dict


def run_peer(name: str, packages: Sequence[str], load: Callable[[Setup], Loaded]) -> None:
    """Nothing; runs the tasks of the command line and prints their figures on the stdout the process was given.

    Other output of the engine goes to stderr, so that stdout holds JSON lines only.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    args = _arguments()
    setup = _setup(args)
    loaded = load(setup)
    load_seconds = time.time() - args.spawned_at
    known = {"versions": _versions(packages), "load_seconds": round(load_seconds, 3)}
    for task in args.task:
        for figure, value, unit, detail in TASKS[task](loaded, args):
            print(json.dumps(asdict(Figure(args.name or name, figure, value, unit, detail | known))), file=out)
            out.flush()


def _setup(args: argparse.Namespace) -> Setup:
    # Sequences at once and tokens of the longest, for each task that is to run; the rest run one short prompt.
    sequences = {"decode": max(args.sequences), "memory": MEMORY_SEQUENCES, "offline": OFFLINE_REQUESTS}
    tokens = {"offline": max(OFFLINE_PROMPTS) + max(OFFLINE_ANSWERS), "prefix": PREFIX_TOKENS + TAIL_TOKENS + 1}
    basis = max(args.prompt_tokens + args.new_tokens, args.prefill_tokens + 1)
    return Setup(
        model=args.model,
        cache_dir=args.cache_dir,
        max_sequences=max(sequences.get(task, 1) for task in args.task),
        context_tokens=max(basis, *(tokens.get(task, 0) for task in args.task)),
        options=dict(option.split("=", 1) for option in args.option),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="directory or file of the weights")
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), required=True)
    parser.add_argument("--name", help="name printed with each figure; the engine's own by default")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefix-repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path, help="directory for compiled programs; none keeps none")
    parser.add_argument("--spawned-at", type=float, default=time.time(), help="time.time() at the process's start")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for this engine alone")
    return parser.parse_args()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def static_batches(prompts: Sequence[list[int]], limits: Sequence[int], size: int) -> list[list[int]]:
    """Indices in batches of `size`, answers of like length together, for engines that run a batch to its longest."""
    order = sorted(range(len(prompts)), key=lambda index: (limits[index], len(prompts[index])))
    return [order[start : start + size] for start in range(0, len(order), size)]
