# SPDX-License-Identifier: Apache-2.0
"""Steps compiled for a target from shapes alone, and what the compiler says of them."""

import time
from dataclasses import dataclass

import jax

from metrale_jax.aot.inspect_module import Inspection, PoolArrays, inspect_module
from metrale_jax.aot.shapes import (
    ARGUMENTS,
    ModelCase,
    StepSizes,
    abstract_model,
    abstract_params,
    describe,
    formatted_pool,
)
from metrale_jax.aot.targets import Target
from metrale_jax.core.errors import ConfigError
from metrale_jax.sharding.rules import make_mesh
from metrale_jax.steps.build import jitted_step


@dataclass(frozen=True)
class Job:
    """One step of one model for one target, sharded over `num_devices` of its chips."""

    target: Target
    model: ModelCase
    step: str
    num_devices: int = 1

    def __post_init__(self):
        if self.step not in ARGUMENTS:
            raise ConfigError(f"step {self.step!r} is unknown to aot; use one of {sorted(ARGUMENTS)}.")


@dataclass(frozen=True)
class StepReport:
    """Seconds, and figures for one device. `flops` is 0 where the compiler gives none.

    `pool_bytes` is the size of the pool's smallest array: temporaries below it cannot hold a copy of any.
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
    inspection: Inspection

    @property
    def problems(self) -> tuple[str, ...]:
        """What speaks against the pool being updated in place, by the module's text and by its memory."""
        found = self.inspection.problems
        if self.temp_bytes < self.pool_bytes:
            return found
        return (*found, f"temporaries of {self.temp_bytes} bytes have room for a pool array of {self.pool_bytes}")


def compile_step(job: Job, sizes: StepSizes) -> StepReport:
    """The report on one job. Errors of the compiler, such as too little memory, pass through."""
    mesh = make_mesh(job.target.devices(), tensor=job.num_devices)
    description = describe(job.model)
    model = abstract_model(description, job.target.platform, sizes)
    params = abstract_params(description.specs, description.config.dtype, mesh)
    pool = formatted_pool(model, job.model.num_blocks, mesh)
    step = jitted_step(job.step, model, jax.tree.map(lambda x: x.format, pool))
    start = time.perf_counter()
    lowered = step.lower(params, pool, *ARGUMENTS[job.step](model, sizes, mesh))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    leaf_bytes = tuple(_device_bytes(leaf) for leaf in jax.tree.leaves(pool))
    return StepReport(
        job=job,
        lower_seconds=lowered_at - start,
        compile_seconds=done - lowered_at,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
        pool_bytes=min(leaf_bytes),
        inspection=inspect_module(compiled.as_text(), PoolArrays(len(jax.tree.leaves(params)), leaf_bytes)),
    )


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
