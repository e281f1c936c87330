# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead: the arguments of each step as shapes only, so that it can begin before the weights are there."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.core.specs import ParamSpec
from metrale_jax.engine import batcher
from metrale_jax.engine.buckets import ShapePlan, make_shape_plan
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.state.pool import abstract_pool
from metrale_jax.steps.build import Steps

Shape = tuple[str, tuple[int, ...]]


def abstract_params(specs: DecoderParams, dtype: str) -> DecoderParams:
    """Shapes and dtypes of the params that `load_params` will make."""

    def leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32 if spec.keep_float32 else jnp.dtype(dtype))

    return jax.tree.map(leaf, specs)


def first_shapes(config: EngineConfig, num_eos_ids: int) -> tuple[Shape, ...]:
    """What a lone short prompt needs."""
    shapes = make_shape_plan(config, num_eos_ids)
    return (("prefill", shapes.prefill_shape(1, 1)), ("decode", (1,)))


def all_shapes(shapes: ShapePlan) -> tuple[Shape, ...]:
    """What any load can need, log-probabilities apart."""
    decode = [("decode", (rows,)) for rows in shapes.all_decode_rows()]
    return (*decode, *(("prefill", shape) for shape in shapes.all_prefill_shapes()))


def compile_shapes(
    steps: Steps, params: Any, config: EngineConfig, num_eos_ids: int, wanted: Sequence[Shape]
) -> Iterator[Shape]:
    """Compiles the wanted steps, two at a time, and yields each when done; `params` may be shapes only.

    Most of a compile runs on one core, so that two take little longer than one.
    """
    model = steps.model
    shapes = make_shape_plan(config, num_eos_ids)
    num_groups = len(model.layout.groups)
    pool = abstract_pool(model.layout, (blocks_for(model.layout, config),) * num_groups)

    def compiled(shape: Shape) -> Shape:
        name, sizes = shape
        state = batcher.rows_state([None] * sizes[-1], shapes, num_groups, model.config.vocab_size)
        chunk = (np.zeros(sizes[0], np.int32), np.zeros(sizes[1], np.int32)) if name == "prefill" else ()
        steps.executable(name, params, pool, state, *chunk, num_logprobs=0)
        return shape

    with ThreadPoolExecutor(max_workers=2) as workers:
        yield from workers.map(compiled, wanted)
