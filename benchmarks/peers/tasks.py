# SPDX-License-Identifier: Apache-2.0
"""What is timed, the same for every peer: tasks over a loaded model, each a generator of figures."""

import argparse
import os
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

# Ids of special tokens lie below the first, those of padding above the last, in the vocabularies that we compare on.
PROMPT_IDS = range(100, 49_000)
START_PROMPT_TOKENS = 32
MEMORY_SEQUENCES = 8
CHECKED_TOKENS = 16
# Offline: so many requests at once, each with a prompt and an answer of its own length.
OFFLINE_REQUESTS, OFFLINE_PROMPTS, OFFLINE_ANSWERS = 64, (16, 256), (16, 128)
# Prefix: a prompt is what many have in common and what is its own.
PREFIX_TOKENS, TAIL_TOKENS = 1000, 16


class Loaded(Protocol):
    """A loaded model, which continues prompts greedily by exactly as many tokens as it is told, end ids ignored.

    A call returns once the last token is on the host.
    """

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt; prompts have one length."""

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """`limits[i]` new token ids of prompt i; prompts have lengths of their own and are all there at once."""


def _prompts(count: int, length: int, seed: str) -> list[list[int]]:
    return _prompts_of([length] * count, seed)


def _prompts_of(lengths: Sequence[int], seed: str) -> list[list[int]]:
    # Fresh random ids for each call: no prefix cache can answer it.
    draw = random.Random(seed)
    return [[draw.choice(PROMPT_IDS) for _ in range(length)] for length in lengths]


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


def offline_shape() -> tuple[list[int], list[int]]:
    """Prompt lengths and answer lengths of the offline requests, in the order in which they are submitted."""
    draw = random.Random("offline")
    shape = [(draw.randint(*OFFLINE_PROMPTS), draw.randint(*OFFLINE_ANSWERS)) for _ in range(OFFLINE_REQUESTS)]
    return [prompt for prompt, _ in shape], [answer for _, answer in shape]


def _offline(loaded: Loaded, args: argparse.Namespace):
    """Answer tokens per second of the whole list, from its submission to its last token."""
    lengths, limits = offline_shape()
    samples, seconds = [], []
    for repeat in range(-1, args.repeats):
        prompts = _prompts_of(lengths, f"{args.seed}/offline/{repeat}")
        start = time.perf_counter()
        answers = loaded.answer(prompts, limits)
        took = time.perf_counter() - start
        assert [len(answer) for answer in answers] == limits, "answers have other lengths than were asked for"
        if repeat >= 0:
            seconds.append(took)
            samples.append(sum(limits) / took)
    detail = {"samples": samples, "seconds": seconds, "prompt_tokens": sum(lengths), "answer_tokens": sum(limits)}
    yield f"offline {OFFLINE_REQUESTS}", median(samples), "tokens/s", detail


def _prefix(loaded: Loaded, args: argparse.Namespace):
    """Milliseconds to the first token behind a prefix never seen, and behind the same one with another tail."""
    colds, warms = [], []
    for repeat in range(-1, args.prefix_repeats):
        prefix, *tails = _prompts_of([PREFIX_TOKENS, TAIL_TOKENS, TAIL_TOKENS], f"{args.seed}/prefix/{repeat}")
        cold, warm = (1e3 * _timed(loaded, [prefix + tail], 1) for tail in tails)
        if repeat >= 0:
            colds.append(cold)
            warms.append(warm)
    yield "prefix cold", median(colds), "ms", {"samples": colds}
    yield "prefix warm", median(warms), "ms", {"samples": warms}
    shares = [100 * warm / cold for warm, cold in zip(warms, colds, strict=True)]
    yield "prefix warm/cold", median(shares), "%", {"samples": shares}


TASKS = {
    "decode": _decode,
    "prefill": _prefill,
    "start": _start,
    "memory": _memory,
    "tokens": _tokens,
    "offline": _offline,
    "prefix": _prefix,
}


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
