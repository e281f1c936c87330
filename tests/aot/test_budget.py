# SPDX-License-Identifier: Apache-2.0
"""What fits, and the least time of a step, against numbers worked out by hand."""

import dataclasses
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_jax.aot.budget import Budget, budget_of
from metrale_jax.aot.chips import CHIPS
from metrale_jax.aot.roofline import Work, decode_work, prefill_work
from metrale_jax.aot.shapes import ModelCase, describe, model_for
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.models.decoder import make_model
from metrale_jax.state.formats import StateFormats

BUDGETS = st.builds(
    Budget,
    capacity=st.integers(10**6, 10**12),
    weights=st.integers(0, 10**11),
    block=st.integers(1, 10**8),
    block_data=st.just(1),
    slot=st.integers(0, 10**7),
    workspace=st.integers(0, 10**10),
    block_size=st.sampled_from([8, 16, 64]),
    gaps=st.just(()),
)


@given(BUDGETS, st.integers(1, 10**5))
def test_the_largest_batch_fits_and_one_more_does_not(budget, context):
    most = budget.max_sequences(context)
    assert most == 0 or budget.fits(most, context)
    assert not budget.fits(most + 1, context)


@given(BUDGETS, st.integers(1, 200), st.integers(16, 10**6))
def test_the_longest_context_fits_and_a_block_more_does_not(budget, sequences, limit):
    longest = budget.max_context(sequences, limit)
    assert longest <= limit
    assert longest == 0 or budget.fits(sequences, longest)
    assert longest == limit or not budget.fits(sequences, longest + budget.block_size)


@pytest.fixture(scope="module")
def qwen():
    """Qwen3-8B as one device holds it: static half and shapes."""
    description = describe(model_for("qwen3-8b"))
    model = make_model(description.config, "cuda", 16, StateFormats("bfloat16", "bfloat16"))
    return model, abstract_params(description.specs, "bfloat16")


def test_a_budget_counts_blocks_as_the_engine_does(qwen):
    budget = budget_of(*qwen, capacity=10**11, workspace=0)
    assert budget.block == 36 * 16 * 8 * 128 * 2 * 2
    config = EngineConfig(max_sequences=5, max_context_tokens=1000, kv_cache_bytes=10**11)
    assert budget.num_blocks(5, 1000) == blocks_for(qwen[0].layout, config)


def test_decode_of_one_sequence_reads_the_weights_and_its_past(qwen):
    model, params = qwen
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert 8.19e9 < count < 8.2e9  # what the model is named for
    work = decode_work(model, params, 1, 1000)
    table = 151936 * 4096
    # Norms are float32 and count double.
    assert work.weight_bytes == pytest.approx(2 * (count - table), rel=1e-3)
    assert work.kv_bytes == 1000 * 36 * 8 * 128 * 2 * 2
    assert work.flops == pytest.approx(2 * (count - table) + 4 * 36 * 32 * 128 * 1000, rel=1e-4)
    assert work.link_bytes == 0


def test_work_grows_with_sequences_but_weights_do_not(qwen):
    one, many = decode_work(*qwen, 1, 1000), decode_work(*qwen, 64, 1000)
    assert many.flops == 64 * one.flops and many.kv_bytes == 64 * one.kv_bytes
    assert many.weight_bytes == pytest.approx(one.weight_bytes, rel=1e-4)


def test_a_chunk_reads_its_past_once_and_each_token_looks_back(qwen):
    work = prefill_work(*qwen, 512, 1000)
    assert work.kv_bytes == 1512 * 36 * 8 * 128 * 2 * 2
    looked = sum(range(1001, 1513))
    head = 2 * 151936 * 4096
    layers = (work.flops - head - 4 * 36 * 32 * 128 * looked) / 512
    assert layers == pytest.approx(2 * (8.19e9 - 2 * 151936 * 4096), rel=1e-3)


QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("tokens, experts", [(1, 8), (3, 24), (16, 128), (64, 128)])
def test_a_step_reads_no_more_experts_than_its_tokens_can_choose(tokens, experts):
    description = describe(ModelCase("qwen3-30b-a3b", QWEN3_30B, 1, 1))
    model = make_model(description.config, "cuda", 16, StateFormats("bfloat16", "bfloat16"))
    params = abstract_params(description.specs, "bfloat16")
    work = decode_work(model, params, tokens, 1000)
    expert, attention, router = 3 * 768 * 2048, 2 * 2048 * (32 + 4) * 128, 128 * 2048
    head, norms = 151936 * 2048, 4 * 48 * (2 * 2048 + 2 * 128)
    read = 2 * (48 * (experts * expert + attention + router) + head) + norms + 2 * tokens * 2048
    assert work.weight_bytes == pytest.approx(read, rel=1e-6)
    # Each token goes through eight experts, however many a step reads.
    attended = 4 * 48 * 32 * 128 * 1000
    assert work.flops == tokens * (2 * (48 * (8 * expert + attention + router) + head) + attended)


def test_a_window_bounds_what_is_read():
    description = describe(model_for("gemma-3-27b"))
    model = make_model(description.config, "cuda", 16, StateFormats("bfloat16", "bfloat16"))
    params = abstract_params(description.specs, "bfloat16")
    short, long = (decode_work(model, params, 1, context).kv_bytes for context in (1024, 8192))
    # Ten of 62 layers see the whole past, the others 1024 tokens.
    assert short == 62 * 1024 * 16 * 128 * 2 * 2
    assert long == (52 * 1024 + 10 * 8192) * 16 * 128 * 2 * 2


def test_the_limit_that_asks_for_most_binds():
    chip = CHIPS["h200"]
    work = Work(1, flops=989e12, weight_bytes=2.4e12, kv_bytes=1.2e12, link_bytes=45e9)
    assert work.seconds_by(chip) == {
        "weights bandwidth": 0.5,
        "KV bandwidth": 0.25,
        "compute": 1.0,
        "interconnect": pytest.approx(0.1),
    }
    assert work.limit(chip) == "compute" and work.seconds(chip) == pytest.approx(1.1)
    assert dataclasses.replace(work, flops=0).seconds(chip) == pytest.approx(0.85)
