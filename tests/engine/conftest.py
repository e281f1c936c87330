# SPDX-License-Identifier: Apache-2.0
"""Engines over the stored checkpoints, all of the same few shapes, and what each request gives alone."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.config import rope_regime
from metrale_jax.engine.admission import Ask
from metrale_jax.engine.buckets import Advance, ShapePlan, make_shape_plan
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.make import make_engine
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.request import Request
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.generate import generate_tokens
from metrale_jax.sampling.constraints import Constraint
from metrale_jax.sampling.params import SamplingParams, seed_bits

CONFIG = EngineConfig(
    max_sequences=8, max_context_tokens=64, block_size=8, kv_cache_bytes=1 << 30, prefill_tokens=64, prefill_rows=4
)
# Room for prompts of many blocks, that one step takes whole.
LONG = replace(CONFIG, max_sequences=9, max_context_tokens=144, prefill_tokens=128)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@dataclass(frozen=True)
class Job:
    """What a test submits."""

    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class WideShapes(ShapePlan):
    """Every step of the largest size, whatever its budget: few programs serve a whole model."""

    chunk_tokens: int = CONFIG.prefill_tokens

    def row_bucket(self, count: int) -> int:
        return self.num_slots

    def advance(self, num_decoding: int, num_tokens: int, num_chunks: int) -> Advance:
        chunks = (self.chunk_tokens, self.prefill_rows) if num_chunks else (0, 0)
        return Advance(self.num_slots if num_decoding else 0, *chunks)


class PaddedSteps:
    """Steps for `generate_tokens` that pad its arrays to an engine's shapes, so that it compiles nothing of its own."""

    def __init__(self, steps, shapes: ShapePlan):
        self.model, self._steps, self._shapes = steps.model, steps, shapes
        self.make_pool = steps.make_pool

    def run(self, name, params, pool, state, *chunk):
        if chunk:
            tokens, lengths = chunk
            sizes = self._shapes.advance(0, len(tokens), 1)
            size, num_rows = sizes.chunk_tokens, sizes.chunk_rows
            chunk = np.pad(tokens, (0, size - len(tokens))), np.pad(lengths, (0, num_rows - 1))
        else:
            num_rows = self._shapes.row_bucket(1)
        state = jax.tree.map(np.asarray, state)
        tables = tuple(widened(table, self._shapes.table_width, 0) for table in state.block_tables)
        sampling = state.sampling
        stops = widened(sampling.stop_ids, self._shapes.stop_ids, self.model.config.vocab_size)
        extras = sampling.extras
        if not isinstance(extras, tuple):
            history_len = self._shapes.table_width * self.model.layout.block_size
            extras = extras.replace(history=widened(extras.history, history_len, 0))
        state = state.replace(block_tables=tables, sampling=sampling.replace(stop_ids=stops, extras=extras))
        state = jax.tree.map(lambda x: np.pad(x, [(0, num_rows - 1)] + [(0, 0)] * (x.ndim - 1)), state)
        pool, state, out = self._steps.run(name, params, pool, state, *chunk, num_logprobs=0)
        return pool, jax.tree.map(lambda x: np.asarray(x)[:1], state), out


def widened(table, width, value):
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=value)


class Kit:
    """One checkpoint: engines over it, and `solo`, what `generate_tokens` gives for a job.

    Engines have the limits of `config`, whose `prefill_tokens` every chunk is padded to where `wide`.
    """

    def __init__(self, golden, wide: bool, config: EngineConfig = CONFIG):
        self.golden, self.params, self.wide, self.config = golden, golden.params, wide, config
        self.num_blocks = blocks_for(golden.layout, config)
        self._solo: dict[Job, list[int]] = {}

    def fill(self, spec):
        """Unwritten memory is NaN, and every pool is of the size that the programs were compiled for."""
        return jnp.full((spec.shape[0], self.num_blocks, *spec.shape[2:]), jnp.nan, spec.dtype)

    def shapes(self, config: EngineConfig | None = None) -> ShapePlan:
        """The sizes of steps."""
        shapes = make_shape_plan(config or self.config, 1)
        return WideShapes(**vars(shapes), chunk_tokens=self.config.prefill_tokens) if self.wide else shapes

    def engine(self, prefill_tokens: int = 64, usable_blocks: int | None = None, params=None, **options) -> Engine:
        """A fresh engine that uses `usable_blocks` of its pool."""
        config = replace(self.config, prefill_tokens=prefill_tokens, **options)
        steps, model = self.golden.steps, self.golden.steps.model
        engine = make_engine(steps, params or self.params, config, self.fill, shapes=self.shapes(config))
        # Steps do not wait for a compiler here, so that what a load does is the same whether or not a test came before.
        engine.device.has_run = lambda sizes: True
        if usable_blocks is not None:
            windows = tuple(spec.window for spec in model.layout.groups)
            regime = partial(rope_regime, model.config)
            engine.roster.memory = Memory(usable_blocks + 1, windows, config.block_size, regime, config.prefix_cache)
            engine.limits = replace(engine.limits, usable_blocks=usable_blocks)
        return engine

    def solo(self, job: Job) -> list[int]:
        """The answer to `job` alone."""
        if job not in self._solo:
            self._solo[job] = self.alone(job)
        return self._solo[job]

    def alone(self, job: Job, structure: Constraint | None = None) -> list[int]:
        """The answer to `job` alone that keeps to `structure`, worked out anew."""
        steps = PaddedSteps(self.golden.steps, self.shapes())
        stop_ids = () if job.params.ignore_eos else job.eos_token_ids
        stop_ids = tuple(dict.fromkeys([*stop_ids, *job.params.stop_token_ids]))
        room = self.config.max_context_tokens - len(job.prompt)
        params = replace(job.params, max_tokens=min(job.params.max_tokens or room, room))
        return generate_tokens(steps, self.params, job.prompt, params, job.seed, stop_ids, self.fill, structure)

    @staticmethod
    def job(prompt, params: SamplingParams = GREEDY, seed: int = 0, eos_token_ids: tuple[int, ...] = ()) -> Job:
        """What a test submits."""
        return Job(tuple(int(token) for token in prompt), params, seed, eos_token_ids)

    @staticmethod
    def submit_all(engine: Engine, job: Job, structure: Constraint | None = None) -> list[Request]:
        """The requests for the answers to `job`, queued."""
        seeds = [seed_bits(job.seed, sample) for sample in range(job.params.n)]
        words = job.params.bad_words
        return engine.submit(
            Ask(job.prompt, job.params, seeds, job.eos_token_ids, bad_words=words, structure=structure)
        )

    @staticmethod
    def submit(engine: Engine, job: Job, structure: Constraint | None = None) -> Request:
        """The request for the first answer to `job`, queued with the others."""
        return Kit.submit_all(engine, job, structure)[0]

    @staticmethod
    def finish(engine: Engine, most_steps: int = 3000) -> None:
        """Runs until no work is left, then asserts that nothing is held."""
        for _ in range(most_steps):
            if not engine.step():
                break
        else:
            raise AssertionError(f"work is left after {most_steps} steps")
        engine.check()
        assert not engine.slots.num_free < engine.shapes.num_slots, "an idle engine holds slots"
        engine.memory.forget()
        assert all(allocator.num_free == allocator.num_usable for allocator in engine.memory.allocators)


class Counting:
    """A device that counts the prompt tokens that it runs."""

    def __init__(self, device):
        self._device, self.prompt_tokens = device, 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def advance(self, decoding, chunks):
        self.prompt_tokens += 0 if chunks is None else int(chunks.lengths.sum())
        return self._device.advance(decoding, chunks)


@pytest.fixture(scope="session")
def kit(golden):
    """`kit(name)`: engines and solo answers of a checkpoint; `wide` pads all steps to their most rows."""
    made = {}

    def make(name: str, wide: bool = True, config: EngineConfig = CONFIG) -> Kit:
        key = name, wide, config
        if key not in made:
            made[key] = Kit(golden(name, config.block_size), wide, config)
        return made[key]

    return make
