# SPDX-License-Identifier: Apache-2.0
"""Every size that a load can bring falls in a known shape."""

import dataclasses

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.buckets import make_shape_plan
from metrale_jax.engine.settings import EngineConfig, blocks_for, within_pool
from metrale_jax.engine.warmup import Draw, Keep, Pick, all_programs, first_programs
from metrale_jax.state.paged import PagedKvSpec
from metrale_jax.state.pool import make_layout

CONFIGS = [
    EngineConfig(),
    EngineConfig(max_sequences=1, prefill_tokens=1),
    EngineConfig(max_sequences=6, prefill_tokens=100, prefill_rows=4),
    EngineConfig(max_sequences=33, prefill_tokens=2048, prefill_rows=1),
    EngineConfig(max_sequences=64, mixed_steps=False),
    EngineConfig(max_sequences=5, num_snapshots=9),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_size_fits_its_shape_and_every_shape_is_announced(config):
    shapes = make_shape_plan(config, 2)
    programs = all_programs(shapes, 100, has_slots=config.num_snapshots > 0)
    announced = set(programs)
    assert len(announced) == len(programs)
    for count in range(1, config.max_sequences + 1):
        assert count <= shapes.row_bucket(count) <= config.max_sequences
        assert {Draw(shapes.row_bucket(count), extras) for extras in (False, True)} <= announced
    for num_tokens in range(1, config.prefill_tokens + 1):
        for num_chunks in range(1, min(config.prefill_rows, config.max_sequences) + 1):
            for num_decoding in (0, 1, config.max_sequences) if config.mixed_steps else (0,):
                sizes = shapes.advance(num_decoding, num_tokens, num_chunks)
                assert num_tokens <= sizes.chunk_tokens <= config.prefill_tokens
                assert num_chunks <= sizes.chunk_rows and num_decoding <= sizes.decode_rows
                assert sizes in announced
                for drawing in (1, config.max_sequences):
                    assert Pick(sizes.num_ends, shapes.row_bucket(drawing)) in announced
                    found_whole = Pick(shapes.pool_slots, shapes.row_bucket(drawing)) in announced
                    assert found_whole or not config.num_snapshots
                assert not config.num_snapshots or Keep(sizes.num_ends, sizes.chunk_rows) in announced
    for num_decoding in range(1, config.max_sequences + 1):
        assert shapes.advance(num_decoding, 0, 0) in announced
    assert set(first_programs(shapes)) <= announced
    assert len(shapes.all_advances()) < 25, "few enough to compile them all"


def test_sizes_of_prompts_are_those_that_steps_are_padded_to():
    assert make_shape_plan(EngineConfig(), 1).prefill_sizes == (16, 32, 64, 128, 256, 512)
    assert make_shape_plan(EngineConfig(prefill_tokens=100), 1).prefill_sizes == (16, 32, 64, 100)
    assert make_shape_plan(EngineConfig(prefill_tokens=5), 1).prefill_sizes == (5,)


def test_what_does_not_fit_is_our_own_mistake():
    shapes = make_shape_plan(EngineConfig(max_sequences=4, prefill_tokens=64), 1)
    with pytest.raises(AssertionError):
        shapes.row_bucket(5)
    with pytest.raises(AssertionError):
        shapes.advance(0, 65, 1)


def test_tables_are_wide_enough_for_the_whole_context():
    shapes = make_shape_plan(EngineConfig(max_context_tokens=33, block_size=16), 1)
    assert shapes.table_width == 3


@pytest.mark.parametrize(
    ("field", "value"), [("max_sequences", 0), ("prefill_tokens", 1.5), ("kv_cache_bytes", True), ("block_size", 24)]
)
def test_a_limit_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        EngineConfig(**{field: value})


LAYOUT = make_layout(((PagedKvSpec(2, 8, 8, 0, "float32"),), (PagedKvSpec(2, 8, 8, 20, "float32"),)), 16, "cpu")


def test_the_pool_is_what_its_bytes_pay_for_and_no_more_than_rows_can_use():
    assert LAYOUT.bytes_per_block(0) + LAYOUT.bytes_per_block(1) == 4096
    assert blocks_for(LAYOUT, EngineConfig(kv_cache_bytes=10 * 4096 + 7)) == 10
    assert blocks_for(LAYOUT, EngineConfig(max_sequences=2, max_context_tokens=32)) == 2 * 3 + 1


def test_a_pool_that_kernels_cannot_address_is_larger_or_if_nobody_pays_smaller():
    layout = make_layout(((PagedKvSpec(8, 128, 128, 0, "int8"),),) * 36, 16, "cuda")
    rows = 36 * 16 * 8  # of a block, for keys and for values
    assert layout.block_bytes == rows * 2 * (128 + 4)
    wanted = EngineConfig(max_sequences=5, max_context_tokens=16 * 999)  # 2.7 GiB of keys
    needed, least, most = 5 * 1000 + 1, 2**32 // (rows * 128) + 1, 2**31 // (rows * 128)
    assert most < needed < least
    assert blocks_for(layout, dataclasses.replace(wanted, kv_cache_bytes=1 << 40)) == least
    assert blocks_for(layout, dataclasses.replace(wanted, kv_cache_bytes=layout.block_bytes * needed)) == most
    assert blocks_for(layout, dataclasses.replace(wanted, kv_cache_bytes=layout.block_bytes * 500)) == 500
    elsewhere = make_layout((layout.groups,) * 36, 16, "tpu")
    assert blocks_for(elsewhere, dataclasses.replace(wanted, kv_cache_bytes=1 << 40)) == needed


def test_blocks_are_counted_as_they_lie_in_the_memory_of_their_platform():
    narrow = ((PagedKvSpec(3, 64, 64, 0, "bfloat16"),),) * 4
    assert [make_layout(narrow, 16, name).block_bytes for name in ("cpu", "cuda")] == [4 * 16 * 3 * 64 * 2 * 2] * 2
    assert make_layout(narrow, 16, "tpu").block_bytes == 4 * 16 * 4 * 128 * 2 * 2
    # A head for each of three devices: tokens lie beside each other.
    assert make_layout(narrow, 16, "tpu", 3).block_bytes == 3 * 4 * 16 * 128 * 2 * 2
    assert make_layout(narrow, 16, "tpu").block_data_bytes == 4 * 16 * 3 * 64 * 2 * 2


def test_a_pool_of_nothing_is_refused_with_the_least_that_would_do():
    with pytest.raises(ConfigError, match="give 12288 or more"):
        blocks_for(LAYOUT, EngineConfig(kv_cache_bytes=12287))


def test_the_context_shrinks_to_what_the_pool_holds():
    config = within_pool(LAYOUT, EngineConfig(kv_cache_bytes=10 * 4096, max_context_tokens=1000))
    assert config.max_context_tokens == 8 * 16
    roomy = EngineConfig(max_context_tokens=64)
    assert within_pool(LAYOUT, roomy) == roomy
