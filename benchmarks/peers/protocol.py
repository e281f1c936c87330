# SPDX-License-Identifier: Apache-2.0
"""What every peer script shares: arguments, prompts, timing, and the one JSON line that it prints for each figure.

Runs in the interpreters of the engines compared, so it needs the standard library alone. A peer script hands over its
name and a function that loads a model; the tasks are then the same for all.
"""

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

# Ids of special tokens lie below the first, those of padding above the last, in the vocabularies that we compare on.
PROMPT_IDS = range(100, 49_000)
START_PROMPT_TOKENS = 32
MEMORY_SEQUENCES = 8
CHECKED_TOKENS = 16


class Loaded(Protocol):
    """A loaded model. `generate` continues each prompt greedily by exactly `max_tokens` tokens, end ids ignored.

    It returns once the last token is on the host.
    """

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""


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
    setup = Setup(
        args.model,
        args.cache_dir,
        max(args.sequences) if {"decode", "memory"} & set(args.task) else 1,
        max(args.prompt_tokens + args.new_tokens, args.prefill_tokens + 1),
        dict(option.split("=", 1) for option in args.option),
    )
    if "memory" in args.task:
        setup = Setup(setup.model, setup.cache_dir, MEMORY_SEQUENCES, setup.context_tokens, setup.options)
    loaded = load(setup)
    load_seconds = time.time() - args.spawned_at
    known = {"versions": _versions(packages), "load_seconds": round(load_seconds, 3)}
    for task in args.task:
        for figure, value, unit, detail in TASKS[task](loaded, args):
            print(json.dumps(asdict(Figure(args.name or name, figure, value, unit, detail | known))), file=out)
            out.flush()


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path, help="directory for compiled programs; none keeps none")
    parser.add_argument("--spawned-at", type=float, default=time.time(), help="time.time() at the process's start")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for this engine alone")
    return parser.parse_args()


def _prompts(count: int, length: int, seed: str) -> list[list[int]]:
    # Fresh random ids for each call: no prefix cache can answer it.
    draw = random.Random(seed)
    return [[draw.choice(PROMPT_IDS) for _ in range(length)] for _ in range(count)]


def _timed(loaded: Loaded, prompts: Sequence[list[int]], max_tokens: int) -> float:
    start = time.perf_counter()
    answers = loaded.generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    lengths = {len(answer) for answer in answers}
    assert len(answers) == len(prompts) and lengths == {max_tokens}, (
        f"asked for {max_tokens} tokens each, got {lengths}"
    )
    return seconds


def _decode(loaded: Loaded, args: argparse.Namespace):
    """Tokens per second past the first: `count * (new - 1)` over the time of a whole run less that to the first."""
    for count in args.sequences:
        samples, firsts, wholes = [], [], []
        for repeat in range(-1, args.repeats):
            seed = f"{args.seed}/{count}/{repeat}"
            first = _timed(loaded, _prompts(count, args.prompt_tokens, seed + "/first"), 1)
            whole = _timed(loaded, _prompts(count, args.prompt_tokens, seed + "/whole"), args.new_tokens)
            if repeat >= 0:
                firsts.append(first)
                wholes.append(whole)
                samples.append(count * (args.new_tokens - 1) / (whole - first))
        detail = {"samples": samples, "first_token_seconds": firsts, "whole_seconds": wholes}
        yield f"decode {count}", median(samples), "tokens/s", detail


def _prefill(loaded: Loaded, args: argparse.Namespace):
    """Prompt tokens per second of one prompt, to its first token."""
    samples = []
    for repeat in range(-1, args.repeats):
        prompts = _prompts(1, args.prefill_tokens, f"{args.seed}/prefill/{repeat}")
        seconds = _timed(loaded, prompts, 1)
        if repeat >= 0:
            samples.append(args.prefill_tokens / seconds)
    yield f"prefill {args.prefill_tokens}", median(samples), "tokens/s", {"samples": samples}


def _start(loaded: Loaded, args: argparse.Namespace):
    """Seconds from the process's start to the first token."""
    _timed(loaded, _prompts(1, START_PROMPT_TOKENS, "start"), 1)
    seconds = time.time() - args.spawned_at
    yield "start", seconds, "s", {"samples": [seconds]}


def _memory(loaded: Loaded, args: argparse.Namespace):
    """Peak resident memory of the process and those it started, over the load and a run of eight sequences."""
    _timed(loaded, _prompts(MEMORY_SEQUENCES, args.prompt_tokens, "memory"), args.new_tokens)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    children = {pid: _peak_mib(pid) for pid in _descendants(os.getpid())}
    total = own + sum(children.values())
    yield "peak memory", total, "MiB", {"samples": [total], "own_mib": own, "children_mib": list(children.values())}


def _tokens(loaded: Loaded, args: argparse.Namespace):
    """The greedy tokens of a fixed prompt, by which two engines show that they run the same model."""
    answer = loaded.generate(_prompts(1, args.prompt_tokens, "tokens"), CHECKED_TOKENS)[0]
    yield "tokens", len(answer), "tokens", {"samples": [], "token_ids": [int(token) for token in answer]}


TASKS = {"decode": _decode, "prefill": _prefill, "start": _start, "memory": _memory, "tokens": _tokens}


def median(samples: Sequence[float]) -> float:
    """The middle one, or the mean of the middle two."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # The parent's id is the second field after the command's name, which may hold spaces and brackets itself.
            fields = _read(entry / "stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        pending += (own := children.get(pending.pop(), []))
        found += own
    return found


def _peak_mib(pid: int) -> float:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
