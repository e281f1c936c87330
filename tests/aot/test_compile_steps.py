# SPDX-License-Identifier: Apache-2.0
"""Steps compiled from shapes alone, here for the CPU, whose compiler is always there."""

import dataclasses
import math

import jax
import pytest

from metrale_jax.aot.chips import Chip
from metrale_jax.aot.compile_steps import Job, compile_step
from metrale_jax.aot.shapes import (
    SMALL,
    ModelCase,
    StepSizes,
    abstract_model,
    abstract_state,
    describe,
    formatted_pool,
    model_for,
)
from metrale_jax.aot.targets import Target
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.sharding.rules import make_mesh

SIZES = StepSizes(num_sequences=4, table_width=4, num_drafts=1)
TINY = ModelCase("tiny", {**SMALL, "num_hidden_layers": 2, "vocab_size": 512, "torch_dtype": "float32"}, 1024, 2)


HERE = Chip("here", "cpu", "cpu", 10**9, 1.0, 1.0, 1.0, 1.0, {})


class AttachedCpu(Target):
    def devices(self):
        return jax.devices("cpu")


@pytest.fixture(scope="module")
def report():
    return compile_step(Job(AttachedCpu(HERE), TINY, "verify"), SIZES)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(jax.devices("cpu"))


def test_a_step_compiled_from_shapes_updates_its_pool_in_place(report):
    assert report.problems == ()
    assert report.pool_bytes == 2 * 1024 * 16 * 3 * 64 * 4
    assert report.alias_bytes >= 2 * report.pool_bytes
    assert report.temp_bytes < report.pool_bytes


def test_temporaries_with_room_for_a_pool_array_are_a_problem(report):
    crowded = dataclasses.replace(report, temp_bytes=report.pool_bytes)
    assert "have room for a pool array" in crowded.problems[-1]


def test_the_8b_model_has_eight_billion_parameters_in_bfloat16(mesh):
    description = describe(model_for("llama-3.1-8b"))
    params = abstract_params(description.specs, description.config.dtype, mesh)
    assert 8.0e9 < sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) < 8.1e9
    assert params.layers[0].mlp.down.weight.dtype == "bfloat16"
    assert params.final_norm.dtype == "float32"


def test_the_pool_is_row_major_and_the_state_as_wide_as_asked(mesh):
    model = abstract_model(describe(TINY), "cpu", SIZES)
    for leaf in jax.tree.leaves(formatted_pool(model, 32, mesh)):
        assert leaf.shape == (2, 32, 16, 3, 64)
        assert leaf.format.layout.major_to_minor == (0, 1, 2, 3, 4)
    assert abstract_state(model, 5, SIZES, mesh).block_tables[0].shape == (5, 4)
