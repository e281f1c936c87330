# SPDX-License-Identifier: Apache-2.0
"""The inspection must pass steps that update their pool in place and fail every way of not doing so."""

import jax
import jax.numpy as jnp
import pytest

from metrale_jax.aot.inspect_module import PoolArrays, inspect_module
from metrale_jax.aot.module_text import array_bytes, parse_module
from metrale_jax.core.errors import Unsupported

SHAPE = (4, 64, 16, 2, 32)
NUM_BYTES = 4 * 64 * 16 * 2 * 32 * 4
WEIGHT = jax.ShapeDtypeStruct((64, 64), jnp.float32)
POOL = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
SLOTS = jax.ShapeDtypeStruct((3,), jnp.int32)


def written(pool, weight, layer, slots):
    rows = jnp.broadcast_to(weight[:3, None, :32], (3, 2, 32))
    return pool.at[layer, slots // 16, slots % 16].set(rows, mode="promise_in_bounds")


def good_step(weight, k, v, slots):
    for layer in range(SHAPE[0]):
        k, v = written(k, weight, layer, slots), written(v, weight * 2, layer, slots)
        weight = weight + jnp.sum(k[layer, slots]) + jnp.sum(v[layer, slots])
    return k, v, weight


def copying_step(weight, k, v, slots):
    changed = written(k, weight, 0, slots)
    # The old pool is still wanted after the write.
    return changed, v, jnp.sum(changed * k)


def doubling_step(weight, k, v, slots):
    k = written(k, weight, 0, slots)
    return k, v, k + 1.0


def transposing_step(weight, k, v, slots):
    k = written(k, weight, 0, slots)
    return k, v, k.swapaxes(1, 2)


def rewriting_step(weight, k, v, slots):
    k = jax.lax.optimization_barrier(k.swapaxes(1, 2)).swapaxes(1, 2)
    return written(k, weight, 0, slots), v, weight


def swapping_step(weight, k, v, slots):
    return written(v, weight, 0, slots), k, weight


def looping_step(weight, k, v, slots):
    def body(layer, carry):
        k, v = carry
        return k.at[layer, slots // 16, slots % 16].set(1.0), v

    k, v = jax.lax.fori_loop(0, SHAPE[0], body, (k, v))
    return k, v, weight


def keeping_loop_step(weight, k, v, slots):
    old = k

    def body(layer, carry):
        return carry.at[layer, slots // 16, slots % 16].set(jnp.sum(old[layer]))

    return jax.lax.fori_loop(0, SHAPE[0], body, k), v, weight


def verdict(step, donated=(1, 2)):
    text = jax.jit(step, donate_argnums=donated, keep_unused=True).lower(WEIGHT, POOL, POOL, SLOTS).compile().as_text()
    return inspect_module(text, PoolArrays(1, (NUM_BYTES, NUM_BYTES)))


@pytest.mark.parametrize("step", [good_step, looping_step])
def test_a_step_in_place_passes(step):
    assert verdict(step).problems == ()
    assert verdict(step).in_place


@pytest.mark.parametrize(
    "step", [copying_step, doubling_step, transposing_step, rewriting_step, swapping_step, keeping_loop_step]
)
def test_a_step_that_writes_a_second_pool_fails(step):
    problems = verdict(step).problems
    assert any("as large as a pool array" in problem for problem in problems), problems


@pytest.mark.parametrize("donated", [(), (1,)])
def test_a_pool_array_that_is_not_donated_is_named(donated):
    problems = verdict(good_step, donated).problems
    for leaf in {0, 1} - {argument - 1 for argument in donated}:
        assert any(f"output {leaf} aliases no parameter" in problem for problem in problems), problems


HEADER = (
    "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }, "
    "entry_computation_layout={()->()}\n"
)
POOL_TEXT = "bf16[2,8,4,8,128]{4,3,2,1,0:T(8,128)(2,1)}"
# Lines as the TPU's and the GPU's compilers print them, cut to what matters.
TPU = """
%fused_computation.1 (param_0: bf16[2,8,4,8,128], param_1: s32[3]) -> bf16[2,8,4,8,128] {{
  %param_0 = {pool} parameter(0)
  %param_1 = s32[3]{{0:T(128)}} parameter(1)
  %rows = bf16[3,8,128]{{2,1,0:T(8,128)(2,1)}} broadcast(%param_1), dimensions={{}}
  ROOT %scatter.1 = {pool} scatter(%param_0, %param_1, %rows), to_apply=%region_0
}}

ENTRY %main (p0: f32[8], p1: bf16[2,8,4,8,128], p2: bf16[2,8,4,8,128]) -> (bf16[2,8,4,8,128]) {{
  %p0 = s32[3]{{0:T(128)}} parameter(0)
  %p1 = {pool} parameter(1), metadata={{op_name="pool.k"}}
  %p2 = {pool} parameter(2)
  {lines}
  ROOT %tuple = ({pool}, /*index=1*/{pool}) tuple(%scatter_fusion, %p2)
}}
"""
SCATTER = "%scatter_fusion = {pool} fusion(%p1, %p0), kind=kCustom, calls=%fused_computation.1"
LIMITS = PoolArrays(1, (2 * 8 * 4 * 8 * 128 * 2,) * 2)


def module(*lines):
    body = "\n  ".join(line.format(pool=POOL_TEXT) for line in lines)
    return HEADER + TPU.format(pool=POOL_TEXT, lines=body)


def test_a_fusion_that_scatters_into_its_parameter_is_in_place():
    assert inspect_module(module(SCATTER), LIMITS).problems == ()


@pytest.mark.parametrize(
    "line",
    [
        '%c = {pool} copy(%p1), metadata={{op_name="jit(step)/append"}}',
        "%c = ({pool}, {pool}, u32[]{{:S(2)}}) copy-start(%p1), cross_program_prefetch_index=0",
        "%c = bf16[2,8,8,4,128]{{4,3,2,1,0:T(4,128)(2,1)}} transpose(%p1), dimensions={{0,1,3,2,4}}",
        '%c = ({pool}, s32[3]{{0}}) custom-call(%p0, %p1), custom_call_target="tpu_custom_call"',
        "%c = f32[2,8,4,8,64]{{4,3,2,1,0}} all-gather(%p0), dimensions={{0}}",
    ],
)
def test_an_instruction_with_a_result_as_large_as_a_pool_array_is_named(line):
    problems = inspect_module(module(line, SCATTER), LIMITS).problems
    assert len(problems) == 1 and " c of " in problems[0]


def test_a_custom_call_that_shares_its_operands_buffer_is_in_place():
    call = (
        '%c = ({pool}, s32[3]{{0}}) custom-call(%p0, %p1), custom_call_target="tpu_custom_call", '
        "output_to_operand_aliasing={{{{0}}: (1, {{}})}}"
    )
    assert inspect_module(module(call, SCATTER), LIMITS).problems == ()


def test_an_asynchronous_start_counts_its_result_and_not_its_operands():
    start = "%c = (({pool}), bf16[3,8,128]{{2,1,0}}, u32[]{{:S(2)}}) async-start(%p1), calls=%fused_computation.1"
    assert inspect_module(module(start, SCATTER), LIMITS).problems == ()


def test_an_alias_to_another_parameter_is_named():
    text = module(SCATTER).replace("{1}: (2, {}", "{1}: (0, {}")
    assert inspect_module(text, LIMITS).problems == ("pool array 1: output 1 aliases parameter 0, not its own 2",)


@pytest.mark.parametrize(
    ("shape", "size"),
    [("pred[3,2]", 6), ("bf16[5]", 10), ("f8e4m3fn[16]", 16), ("s4[4]", 2), ("f32[]", 4), ("s32[<=8,2]", 64)],
)
def test_bytes_follow_dtype_and_dimensions(shape, size):
    assert array_bytes(shape) == size


def test_text_that_is_no_scheduled_module_is_refused():
    with pytest.raises(Unsupported, match="not a scheduled HLO module"):
        parse_module("module @jit_step {")


def test_the_largest_copies_are_reported_with_their_origin():
    line = '%c = {pool} copy(%p1), metadata={{op_name="jit(step)/append"}}'
    copies = inspect_module(module(line, SCATTER), LIMITS).largest_copies
    assert [str(copy) for copy in copies] == ["copy c of 0.1 MB from jit(step)/append"]
