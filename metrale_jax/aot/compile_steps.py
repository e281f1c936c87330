# SPDX-License-Identifier: Apache-2.0
"""Steps compiled for a target from shapes alone, and what the compiler says of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from metrale_jax.aot.collectives import Collective, Intended, collectives
from metrale_jax.aot.drafters import DRAFTERS
from metrale_jax.aot.inspect_module import Inspection, PoolArrays, inspect_module
from metrale_jax.aot.module_text import parse_module
from metrale_jax.aot.shapes import (
    ARGUMENTS,
    DRAFTING_ARGUMENTS,
    ModelCase,
    StepSizes,
    abstract_model,
    describe,
    formatted_pool,
    step_tokens,
)
from metrale_jax.aot.targets import Target
from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.models.decoder import Model
from metrale_jax.models.tensor_parallel import shared
from metrale_jax.sharding.rules import make_mesh
from metrale_jax.steps.build import jitted_step
from metrale_jax.steps.home import row_major_over

# Of the pool's bytes, what else a step may update in place.
STORAGE_ERROR = 0.001
# One part in so many of the pool: what is smaller, such as pending rows, is looked for in the module's text alone.
LARGE = 100


@dataclass(frozen=True)
class Job:
    """One step of one model for one target, whose devices share the model."""

    target: Target
    model: ModelCase
    step: str

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: more where devices share it, since what else they hold is not all shared out."""
        return self.model.num_blocks * max(1, self.target.num_devices // 2)

    def __post_init__(self):
        if self.step not in self.arguments:
            raise ConfigError(
                f"step {self.step!r} is unknown to aot for {self.model.name}; use one of {sorted(self.arguments)}."
            )

    @property
    def arguments(self) -> Mapping[str, Callable]:
        """What each step of the model takes."""
        return DRAFTING_ARGUMENTS if self.model.proposer else ARGUMENTS


@dataclass(frozen=True)
class StepReport:
    """Seconds, and figures for one device. `flops` is 0 where the compiler gives none.

    `pool_bytes` is the size of the pool's smallest large array: temporaries below it cannot hold a copy of any.
    `storage_bytes` is what the pool's layout says that it takes.
    """

    job: Job
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    flops: float
    pool_bytes: int
    storage_bytes: int
    inspection: Inspection
    collectives: tuple[Collective, ...] = ()
    unintended: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What speaks against the pool being updated in place, by the module's text and by its memory, and against
        what the devices tell each other."""
        found = [*self.inspection.problems, *self.unintended]
        if self.temp_bytes >= self.pool_bytes:
            found.append(f"temporaries of {self.temp_bytes} bytes have room for a pool array of {self.pool_bytes}")
        if abs(self.alias_bytes - self.storage_bytes) > STORAGE_ERROR * self.storage_bytes:
            found.append(f"the pool takes {self.alias_bytes} bytes, not the {self.storage_bytes} of its layout")
        return tuple(found)


def compile_step(job: Job, sizes: StepSizes) -> StepReport:
    """The report on one job. Errors of the compiler, such as too little memory, pass through."""
    devices = job.target.devices()
    mesh = make_mesh(devices, tensor=len(devices))
    description, sharing = shared(describe(job.model), mesh)
    proposer, weights = DRAFTERS[job.model.proposer](description.config) if job.model.proposer else (None, ())
    model = abstract_model(description, job.target.platform, sizes, sharing, proposer)
    params = abstract_params(description.specs.replace(drafter=weights), description.config.dtype, mesh)
    pool = formatted_pool(model, job.num_blocks, mesh, job.model.num_slots)
    arguments = job.arguments[job.step](model, sizes, mesh)
    static = {"num_drafts": sizes.num_drafts} if job.step == "speculate" else {}
    step = jitted_step(job.step, model, row_major_over(mesh), pool, **static)
    start = time.perf_counter()
    lowered = step.lower(params, pool, *arguments)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    arrays = PoolArrays(len(jax.tree.leaves(params)), tuple(map(_device_bytes, jax.tree.leaves(pool))))
    layout = model.layout
    storage = job.num_blocks * layout.block_bytes + job.model.num_slots * layout.bytes_per_slot
    storage += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool.carry)) * len(devices)
    told, unintended = _told(compiled.as_text(), model, sizes, job.step, (params, pool))
    return StepReport(
        job=job,
        lower_seconds=lowered_at - start,
        compile_seconds=done - lowered_at,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
        pool_bytes=arrays.smallest(LARGE),
        storage_bytes=storage // len(devices),
        inspection=inspect_module(compiled.as_text(), arrays),
        collectives=told,
        unintended=unintended,
    )


def _told(text: str, model: Model, sizes: StepSizes, step: str, held) -> tuple[tuple, tuple]:
    """What the devices tell each other, and what of it was not intended."""
    found = tuple(collectives(parse_module(text)))
    if model.mesh is None:
        return found, tuple(f"{one}, on one device" for one in found)
    whole = frozenset(tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(held) if len(leaf.shape) > 1)
    config, embedding = model.config, _shared(held[0].embed)
    tokens, layers = step_tokens(step, sizes), len(config.layers)
    intended = Intended(tokens, layers, config.hidden_dim, whole, embedding, config.vocab_size)
    return found, intended.problems(found)


def _shared(leaf: jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding.shard_shape(leaf.shape) != leaf.shape


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
