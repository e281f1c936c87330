# SPDX-License-Identifier: Apache-2.0
"""What devices tell each other is read from text as compilers print it, and held to what was intended."""

import pytest

from metrale_jax.aot.collectives import Collective, Intended, collectives
from metrale_jax.aot.module_text import parse_module

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->()}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}}

ENTRY %main (p0: bf16[64,4096]) -> bf16[64,4096] {{
  %p0 = bf16[64,4096]{{1,0}} parameter(0)
  %p1 = bf16[512,4096]{{1,0}} parameter(1)
  {lines}
  ROOT %copy = bf16[64,4096]{{1,0}} copy(%p0)
}}
"""
SUM = "%r.{n} = bf16[64,4096]{{1,0}} all-reduce(%p0), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%sum"
INTENDED = Intended(64, 1, 4096, frozenset({(4096, 4096)}), embedding=True, vocab=128)


def found(*lines):
    text = "\n  ".join(line.format(n=n) for n, line in enumerate(lines))
    return list(collectives(parse_module(TEXT.format(lines=text))))


def test_two_sums_a_layer_and_one_for_the_embedding_are_intended():
    assert INTENDED.problems(found(SUM, SUM, SUM)) == ()


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_sums_is_told(count):
    assert INTENDED.problems(found(*[SUM] * count)) == (f"{count} sums of 64 hidden rows of 4096, intended are 3",)


def test_sums_that_the_compiler_joined_count_each():
    joined = "%j = (bf16[64,4096]{{1,0}}, bf16[64,4096]{{1,0}}) all-reduce(%p0, %p0), to_apply=%sum"
    assert INTENDED.problems(found(SUM, joined)) == ()


@pytest.mark.parametrize(
    "line",
    [
        "%g = bf16[4096,4096]{{1,0}} all-gather(%p1), dimensions={{0}}",
        "%g = (bf16[512,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) all-gather-start(%p1), dimensions={{0}}",
        "%g = bf16[4096,4096]{{1,0}} collective-permute(%p1), source_target_pairs={{{{0,1}}}}",
    ],
)
def test_the_whole_of_a_weight_on_a_device_is_told(line):
    problems = INTENDED.problems(found(SUM, SUM, SUM, line))
    assert "the whole of a weight or of the pool" in problems[-1] and "bf16[4096,4096]" in problems[-1]


def test_much_that_is_neither_a_sum_nor_logits_is_told():
    [problem] = INTENDED.problems(found(SUM, SUM, SUM, "%n = u32[64,18993]{{1,0}} all-gather(%p0), dimensions={{1}}"))
    assert problem == "all-gather to u32[64,18993] from the compiler, neither a sum of hidden rows nor logits"


def test_an_asynchronous_start_is_one_collective_with_its_result():
    [one] = found("%s = (bf16[64,4096]{{1,0}}, bf16[64,4096]{{1,0}}) all-reduce-start(%p0), to_apply=%sum")
    assert one == Collective("all-reduce", ("bf16[64,4096]",), "")
    assert one.num_bytes == 64 * 4096 * 2


@pytest.mark.parametrize("shape", ["f32[64000,128]{{1,0}}", "f32[8,16,64000]{{2,1,0}}"])
def test_logits_may_be_gathered(shape):
    assert INTENDED.problems(found(SUM, SUM, SUM, f"%l = {shape} all-gather(%p0), dimensions={{{{1}}}}")) == ()
