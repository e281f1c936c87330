# SPDX-License-Identifier: Apache-2.0
"""What programs ask for beside weights and pool, which only their compiler knows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from metrale_jax.engine.buckets import Advance, ShapePlan
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.engine.warmup import Draw, Program, Score, all_programs, compile_programs
from metrale_jax.progress import Progress
from metrale_jax.steps.build import Steps

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Workspace:
    """Bytes on one device by program, or why the compiler gave none."""

    by_program: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""

    @property
    def largest(self) -> str:
        """The program that asks for most."""
        return max(self.by_program, key=lambda name: self.by_program[name])

    @property
    def num_bytes(self) -> int:
        """What to keep free: as much as the program that asks for most; 0 where the compiler refused."""
        return max(self.by_program.values(), default=0)


def hungriest(shapes: ShapePlan, vocab_size: int) -> tuple[Program, ...]:
    """The programs that ask for most: the widest step of each kind, the widest draw and the longest scoring."""
    programs = all_programs(shapes, vocab_size)
    advances = [program for program in programs if isinstance(program, Advance)]
    kinds: dict[tuple[bool, bool], Advance] = {}
    for one in sorted(advances, key=lambda a: (a.chunk_tokens, a.chunk_rows, a.decode_rows)):
        kinds[one.decode_rows > 0, one.chunk_tokens > 0] = one
    if (True, True) in kinds:
        kinds.pop((False, True), None)  # what only prefills is a part of what decodes too
    draws = [program for program in programs if isinstance(program, Draw)]
    scores = [program for program in programs if isinstance(program, Score)]
    widest = max(draws, key=lambda draw: (draw.rows, draw.extras, draw.num_logprobs))
    return *kinds.values(), widest, max(scores, key=lambda score: score.num_tokens)


def measured(
    steps: Steps, params: Any, config: EngineConfig, programs: Sequence[Program], progress: Progress
) -> Workspace:
    """The workspace of these programs, compiled whole. A step too big for its device has a refusal instead."""
    promised = compile_programs(steps, params, config, programs)
    found: dict[str, int] = {}
    for count, (program, future) in enumerate(zip(programs, promised, strict=True), start=1):
        progress("compile", count - 1, len(programs))
        try:
            future.result()
        except jax.errors.JaxRuntimeError as error:
            for other in promised:
                other.cancel()
            if OUT_OF_MEMORY not in str(error):
                raise
            return Workspace(refusal=f"{program} is too big for the device ({_short(error)})")
        progress("compile", count, len(programs))
    for key, compiled in steps.programs().items():
        found[_name(key)] = max(needed_bytes(compiled), found.get(_name(key), 0))
    return Workspace(found)


def needed_bytes(compiled: Any) -> int:
    """Bytes that a program needs on a device while it runs, beside its arguments: temporaries, new results, code."""
    memory = compiled.memory_analysis()
    fresh = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return memory.temp_size_in_bytes + fresh + memory.generated_code_size_in_bytes


def _name(key: str) -> str:
    return re.match(r"\('(\w+)'", key).group(1)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    found = re.search(r"Used [\d.]+\w+ of [\d.]+\w+ \w+", text)
    return found.group() if found else text[:160]
