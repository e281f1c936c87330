# SPDX-License-Identifier: Apache-2.0
"""What the engine counts of itself: `EngineStats`, a view at one moment, and the counters behind it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from metrale_jax.engine.request import Request
from metrale_jax.engine.snapshots import NO_SNAPSHOTS
from metrale_jax.speculative.policy import DraftStats

# Seconds over which the present rate of tokens is taken.
RECENT_S = 10
PHASES = ("plan", "launch", "read")
REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment; counts are since its start, seconds too.

    `num_waiting`, `num_prefilling` and `num_running` requests, each answer of n one and a beam search one. Blocks of
    the scarcest group: `used_blocks` by requests, `cached_blocks` kept for later prompts, `free_blocks`; together they
    are all that can be used. `prompt_tokens` began to run, of which `cached_tokens` were found in the prefix cache; a
    prompt that is run again counts once. `generated_tokens` stand in answers; a beam search generates one a step.
    `finished` counts requests by finish reason. `num_steps` were launched. `plan_s`, `launch_s` and `read_s` share out
    the time inside steps: compiling in a step is part of launching, reading includes the wait for the device. Of
    `uptime_s` the rest was idle. `num_compiles` programs were compiled, also before the engine was there.
    `num_unreported` requests ended whose `on_finish` raised. `recent_tokens_per_s` is the rate of generated tokens over
    the last ten seconds. Of a model with recurrent layers there is room for `num_snapshots` states, of which
    `used_snapshots` are kept; so many were taken, found by prompts, and evicted. Of the preemptions `num_swaps` copied
    what the request held to the host, where it takes `swapped_bytes` now. `drafts` says how drafting stands, None
    without.
    """

    num_waiting: int
    num_prefilling: int
    num_running: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_compiles: int
    num_unreported: int
    plan_s: float
    launch_s: float
    read_s: float
    uptime_s: float
    recent_tokens_per_s: float
    finished: tuple[tuple[str, int], ...]
    num_snapshots: int = 0
    used_snapshots: int = 0
    snapshots_taken: int = 0
    snapshot_hits: int = 0
    snapshots_evicted: int = 0
    num_swaps: int = 0
    swapped_bytes: int = 0
    drafts: DraftStats | None = None

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def busy_s(self) -> float:
        """Time inside steps."""
        return self.plan_s + self.launch_s + self.read_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time inside steps, since the start."""
        return self.generated_tokens / self.busy_s if self.busy_s else 0.0


class RecentRate:
    """Events a second over the last `RECENT_S` seconds, the present one included as far as it has come."""

    def __init__(self, now: float):
        self._began = now
        self._seconds, self._counts = [-1] * RECENT_S, [0] * RECENT_S

    def add(self, count: int, now: float) -> None:
        """Notes `count` events."""
        second = int(now)
        place = second % RECENT_S
        if self._seconds[place] != second:
            self._seconds[place], self._counts[place] = second, 0
        self._counts[place] += count

    def per_s(self, now: float) -> float:
        """The rate; over less time while fewer seconds have passed since the start."""
        first = int(now) - RECENT_S + 1
        span = now - max(self._began, first)
        pairs = zip(self._seconds, self._counts, strict=True)
        return sum(count for second, count in pairs if second >= first) / span if span > 0 else 0.0


class Counters:
    """What the loop adds up, from its start at `now` on."""

    def __init__(self, now: float):
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.num_steps = self.num_preemptions = self.num_unreported = self.num_swaps = 0
        self.finished = dict.fromkeys(REASONS, 0)
        self._seconds = dict.fromkeys((*PHASES, "idle"), 0.0)
        self._recent = RecentRate(now)
        self._phase, self._since, self._began = "idle", now, now

    def enter(self, phase: str, now: float) -> str:
        """The phase that ends now, whose time is added up; `phase` begins: one of `PHASES`, or "idle"."""
        ended = self._phase
        self._seconds[ended] += now - self._since
        self._phase, self._since = phase, now
        return ended

    def count_prompt(self, num_tokens: int, cached_tokens: int) -> None:
        """Adds a prompt that begins to run."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached_tokens

    def count_generated(self, num_tokens: int, now: float) -> None:
        """Adds tokens of answers."""
        self.generated_tokens += num_tokens
        self._recent.add(num_tokens, now)

    def view(self, engine: Any) -> EngineStats:
        """These counts with what the engine holds now. Changes nothing, and may be asked while a step runs."""
        memory, now = engine.memory, engine.clock()
        pairs = zip(memory.allocators, memory.tree.num_evictable, strict=True)
        allocator, cached = min(pairs, key=lambda pair: pair[0].num_free + pair[1])
        free = allocator.num_free
        kept = NO_SNAPSHOTS if memory.snapshots is None else memory.snapshots.stats
        return EngineStats(
            num_waiting=num_requests(engine.waiting),
            num_prefilling=num_requests(list(engine.filling)),
            num_running=num_requests(list(engine.running.values())),
            used_blocks=allocator.num_usable - free - cached,
            cached_blocks=cached,
            free_blocks=free,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_compiles=engine.device.num_compiles,
            num_unreported=self.num_unreported,
            plan_s=self._seconds["plan"],
            launch_s=self._seconds["launch"],
            read_s=self._seconds["read"],
            uptime_s=now - self._began,
            recent_tokens_per_s=self._recent.per_s(now),
            finished=tuple(self.finished.items()),
            num_snapshots=kept.num_units,
            used_snapshots=kept.num_kept + kept.num_running,
            snapshots_taken=kept.taken,
            snapshot_hits=kept.hits,
            snapshots_evicted=kept.evicted,
            num_swaps=self.num_swaps,
            swapped_bytes=memory.swap.num_bytes,
            drafts=None if engine.drafting is None else engine.drafting.stats(),
        )


def num_requests(rows: Iterable[Request]) -> int:
    """Requests behind rows of the engine: those that will fork from one count, the beams of a search are one."""
    leaders = {row.search.leader if row.search is not None else row for row in rows}
    waiting = [one for row in leaders if row.search is None for one in row.followers if not one.finished]
    return len(leaders) + len(waiting)
