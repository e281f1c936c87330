# SPDX-License-Identifier: Apache-2.0
"""What the engine counts of itself: `EngineStats`, a view at one moment, and the counters behind it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment; counts are since its start, seconds too.

    `num_waiting`, `num_prefilling` and `num_running` requests; blocks of the scarcest group `used_blocks` by them,
    `cached_blocks` kept for later prompts and `free_blocks`. `prompt_tokens` of which `cached_tokens` were found in the
    prefix cache, `generated_tokens`. `finished` counts requests by finish reason. `plan_s`, `launch_s` and `read_s`
    share out the steps' host time; reading includes the wait for the device. `num_compiles` programs were compiled.
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
    plan_s: float
    launch_s: float
    read_s: float
    finished: tuple[tuple[str, int], ...]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time spent in steps."""
        busy = self.plan_s + self.launch_s + self.read_s
        return self.generated_tokens / busy if busy else 0.0


@dataclass
class Counters:
    """What the loop adds up."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    read_s: float = 0.0
    finished: Counter = field(default_factory=Counter)

    def count_prompt(self, num_tokens: int, cached_tokens: int) -> None:
        """Adds a prompt that begins to run."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached_tokens

    def time_step(self, plan_s: float, launch_s: float, read_s: float) -> None:
        """Adds a step's seconds."""
        self.num_steps += 1
        self.plan_s += plan_s
        self.launch_s += launch_s
        self.read_s += read_s

    def view(self, engine: Any) -> EngineStats:
        """These counts with what the engine holds now."""
        memory = engine.memory
        scarcest = min(range(len(memory.allocators)), key=lambda group: memory.allocators[group].num_free)
        allocator, cached = memory.allocators[scarcest], memory.tree.num_evictable[scarcest]
        return EngineStats(
            num_waiting=len(engine.waiting),
            num_prefilling=len(engine.filling),
            num_running=len(engine.running),
            used_blocks=allocator.num_usable - allocator.num_free - cached,
            cached_blocks=cached,
            free_blocks=allocator.num_free,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_compiles=engine.device.num_compiles,
            plan_s=self.plan_s,
            launch_s=self.launch_s,
            read_s=self.read_s,
            finished=tuple(sorted(self.finished.items())),
        )
