# SPDX-License-Identifier: Apache-2.0
"""Recorded figures of compiled kernels: they keep to their limits, cover every kernel, and are read rightly."""

import dataclasses

import pytest

from benchmarks.static.__main__ import TARGETS, load_record, main
from benchmarks.static.cuda import blocks_per_multiprocessor, count_instructions, parse_thunks, state_figures
from benchmarks.static.gates import problems
from benchmarks.static.layer_rows import DeltaSizes, ExpertSizes, SsdSizes
from benchmarks.static.rows import ROWS, Row, Sizes, rows_of
from benchmarks.static.tpu import attention_figures
from benchmarks.static.traffic import decode_traffic, traffic
from metrale_jax.aot.targets import target_for
from pallas_kernels.causal_conv1d import op as causal_conv1d
from pallas_kernels.gated_delta import op as gated_delta
from pallas_kernels.grouped_matmul import op as grouped_matmul
from pallas_kernels.kv_append import op as kv_append
from pallas_kernels.paged_attention import op as paged_attention
from pallas_kernels.ssd import op as ssd

KERNELS = ("triton", "mosaic_gpu", "mosaic_tpu")
TABLES = (
    ("decode", paged_attention.IMPLEMENTATIONS),
    ("prefill", paged_attention.RAGGED_IMPLEMENTATIONS),
    ("append", kv_append.IMPLEMENTATIONS),
    ("gated_delta", gated_delta.IMPLEMENTATIONS),
    ("gated_delta_ragged", gated_delta.RAGGED_IMPLEMENTATIONS),
    ("ssd_rows", ssd.IMPLEMENTATIONS),
    ("ssd_ragged", ssd.RAGGED_IMPLEMENTATIONS),
    ("conv_rows", causal_conv1d.IMPLEMENTATIONS),
    ("grouped_matmul", grouped_matmul.IMPLEMENTATIONS),
)
GOOD = {
    "kernels": 1,
    "registers": 114,
    "spill_bytes": 0,
    "shared_bytes": 39168,
    "blocks": 4,
    "matrix_ops": {"mma.sync": 32},
    "wide_share": 0.96,
    "bytes_ratio": 1.0,
}
ROW = Row("decode", "triton", "cuda", "bfloat16", "bfloat16", Sizes(128, 128), min_blocks=2)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_recorded_for_every_target_and_keeps_to_its_limits(target):
    record = load_record(target)["rows"]
    rows = rows_of(target, target_for(target).platform)
    assert set(record) == {row.name for row in rows}
    assert {row.name: problems(row, record[row.name], record[row.name]) for row in rows} == {
        row.name: [] for row in rows
    }


@pytest.mark.parametrize(("entry", "table"), TABLES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_kernel_of_a_table_has_rows_for_every_chip_of_its_platform(entry, table):
    kernels = [(row.name, platform) for row in table for platform in row.platforms if row.name in KERNELS]
    assert kernels
    for impl, platform in kernels:
        own = [row for row in ROWS if (row.entry, row.impl, row.platform) == (entry, impl, platform)]
        targets = {target for target in TARGETS if target_for(target).platform == platform}
        recorded = {target for target in targets if set(own) & set(rows_of(target, platform))}
        # Tensor memory accelerators are what Mosaic GPU's kernel is made for, and no chip but one is served.
        assert recorded == ({"h200"} if impl == "mosaic_gpu" else targets)
        assert any(row.quick for row in own)


def test_names_of_rows_are_their_own():
    assert len({(row.platform, row.name) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("worse", "message"),
    [
        ({"spill_bytes": 8}, "8 bytes are spilled"),
        ({"blocks": 1}, "1 blocks fit a multiprocessor, 2 are meant to"),
        ({"kernels": 2}, "2 kernels are launched, 1 are meant to be"),
        ({"matrix_ops": {}}, "no matrix instruction"),
        ({"wide_share": 0.3}, "0.3 of the bytes are loaded in wide pieces"),
        ({"bytes_ratio": 1.2}, "1.2 of the least bytes are moved, 1.05 may be"),
        ({"asked_ratio": 2.1}, "2.1 of the least bytes are asked for, 1.75 may be"),
        ({"registers": 130}, "registers is 130, recorded is 114"),
        ({"shared_bytes": 50000}, "shared_bytes is 50000, recorded is 39168"),
    ],
)
def test_a_figure_beyond_its_limit_or_behind_its_record_is_named(worse, message):
    assert problems(ROW, GOOD, GOOD) == []
    found = problems(ROW, {**GOOD, **worse}, GOOD)
    assert any(message in problem for problem in found)


def test_what_no_matrix_is_multiplied_in_needs_no_matrix_instruction():
    copying = dataclasses.replace(ROW, tensor_cores=False)
    assert problems(copying, {**GOOD, "matrix_ops": {}, "wide_share": 0.1}, GOOD) == []


def test_instructions_are_counted_by_kind_and_width():
    ptx = """
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
    @%p1 ld.global.b32 { %r5 }, [ %rd2 + 0 ];
    ld.global.L1::evict_last.v2.b64 {%rd5, %rd6}, [ %rd7 ];
    cp.async.cg.shared.global [ %r6 + 0 ], [ %rd3 + 0 ], 0x10, %r7;
    cp.async.ca.shared.global [ %r6 + 0 ], [ %rd3 + 0 ], 0x4, %r7;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [ %r9 ];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
    wgmma.wait_group.sync.aligned 0;
    @%p1 st.global.v2.b32 [ %rd2 + 0 ], { %r5, %r6 };
    st.global.b16 [ %rd2 + 0 ], { %rs5 };
    st.shared.v4.b32 [ %r9 ], {%r1, %r2, %r3, %r4};
    """
    found = count_instructions(ptx)
    assert found["matrix_ops"] == {"mma.sync": 1, "wgmma.mma_async": 1}
    assert found["loads"] == {"4": 2, "16": 3}
    assert found["stores"] == {"2": 1, "8": 1}
    assert found["wide_share"] == round(48 / 56, 3)


def test_bytes_are_those_of_the_tokens_seen_and_of_splits_twice():
    whole = Row("decode", "triton", "cuda", "bfloat16", "int8", Sizes(128, 128, table_width=32))
    assert decode_traffic(whole)["bytes_ratio"] == 1.0
    found = decode_traffic(dataclasses.replace(whole, sizes=Sizes(128, 128, num_sequences=1, table_width=128)))
    pasts = 128 * 16 * 8 * (128 + 4) * 2
    least = pasts + 2 * 32 * 128 * 2 + 128 * 4
    assert found["splits"] == 4
    assert found["bytes_ratio"] == round(1 + 2 * 4 * 32 * 129 * 4 / least, 4)
    # Of splits that lie before the window no more than the weight is written.
    late = decode_traffic(dataclasses.replace(whole, sizes=Sizes(128, 128, table_width=128, window=64)))
    pasts = 64 * 8 * (128 + 4) * 2
    least = pasts + 2 * 32 * 128 * 2 + 4 * 4
    assert late["bytes_ratio"] == round(1 + 2 * 32 * (4 + 128) * 4 / least, 4)
    # A window ends within a block: its last sector is fetched whole.
    narrow = Sizes(16, 16, num_kv_heads=1, window=17)
    assert decode_traffic(dataclasses.replace(whole, sizes=narrow, kv_format="fp8_e4m3"))["bytes_ratio"] > 1


def test_bytes_of_states_are_a_read_and_a_write_in_whole_sectors():
    row = Row("gated_delta", "triton", "cuda", "float32", "bfloat16", DeltaSizes(2, 4, 8, 12))
    token = (2 * 2 * 8 + 2 * 4 * 12 + 2 * 4) * 4
    least = 2 * 4 * 8 * 12 * 2 + token
    # Twelve numbers of two bytes take a sector of 32.
    assert traffic(row)["bytes_ratio"] == round((2 * 4 * 8 * 32 + token) / least, 4)
    row = Row("ssd_rows", "triton", "cuda", "bfloat16", "float32", SsdSizes(4, 2, 16, 8, room=2))
    x, b = 4 * 16, 2 * 8
    least = 2 * 4 * 16 * 8 * 4 + (x + 2 * b) * 2 + 4 * 4 + x * 4 + 2 * (x + b + 4) * 4
    moved = least + 2 * (x + 2 * b + 4) * 4 + 2 * 2 * (x + b + 4) * 4
    assert traffic(row)["bytes_ratio"] == round(moved / least, 4)


def test_bytes_of_experts_are_those_of_weights_that_rows_meet():
    sizes = ExpertSizes(6, 4, 256, 128)
    row = Row("grouped_matmul", "triton", "cuda", "bfloat16", "bfloat16", sizes)
    least = (4 * 256 * 128 + 6 * (128 + 256)) * 2
    assert traffic(row)["bytes_ratio"] == round((least + 6 * 256 * 2) / least, 4)
    # Of tiles of 16 rows, all 4 are written and read by one piece of the weights, and their answers twice.
    laid_out = 2 * 64 * 128 * 2 + 2 * 64 * 256 * 2
    on_a_tpu = dataclasses.replace(row, impl="mosaic_tpu", platform="tpu")
    assert traffic(on_a_tpu)["bytes_ratio"] == round((least + laid_out) / least, 4)
    assert traffic(dataclasses.replace(row, sizes=dataclasses.replace(sizes, num_rows=400))) == {}


def test_a_state_that_is_copied_or_asked_for_twice_shows():
    row = Row("gated_delta", "triton", "cuda", "float32", "float32", DeltaSizes(2, 4, 8, 32, num_sequences=2, slots=5))
    states = 4 * 5 * 4 * 8 * 32 * 4
    found = {**traffic(row), "loads": {"16": 4}, "stores": {"16": 4}, "threads": 64, "grid": [2, 4, 1]}
    figures = state_figures(row, found, states)
    assert figures["pool_share"] == 1.0
    assert figures["asked_ratio"] == round(8 * 16 * 64 * 8 / (2 * found["unmasked_bytes"]), 4)
    drafting = dataclasses.replace(row, sizes=dataclasses.replace(row.sizes, width=3, room=2))
    # Nobody knows how often a loop goes round; the largest of what is pending is its values.
    assert state_figures(drafting, found, 4 * 5 * 2 * 4 * 32 * 4) == {"temp_bytes": 20480, "pool_share": 1.0}
    assert state_figures(ROW, found, states) == {}


def test_launches_are_read_once_though_a_command_buffer_repeats_them():
    kernel = "001: kCustomKernel [] paged_decode grid: [8, 1, 64] threads: [128, 1, 1]  shared_memory: 96 bytes"
    lines = [kernel, "002: kCopy [source | sink]", "000: kCommandBuffer [source | sink]", f"    {kernel}"]
    assert parse_thunks("\n".join(lines)) == [
        {"name": "paged_decode", "grid": [8, 1, 64], "threads": 128, "shared_bytes": 96},
        {"name": "kCopy", "grid": [], "threads": 0, "shared_bytes": 0},
    ]


# By NVIDIA's occupancy calculator for compute capability 9.0.
@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(128, 114, 39168, 4), (128, 255, 0, 2), (256, 128, 0, 2), (128, 32, 100000, 2), (1024, 64, 0, 1), (32, 16, 0, 32)],
)
def test_blocks_of_a_multiprocessor(threads, registers, shared, blocks):
    assert blocks_per_multiprocessor(threads, registers, shared) == blocks


def test_an_unknown_target_exits_2(capsys):
    assert main(["--targets", "h300"]) == 2
    assert "target 'h300' is unknown" in capsys.readouterr().err


def test_bytes_that_a_tpu_moves_are_those_of_whole_blocks_in_padded_tiles():
    # 160 tokens of 3 heads of 64 numbers in bfloat16, in tiles of 4 by 128: 1 KiB a token for keys, and for values.
    row = Row("decode", "mosaic_tpu", "tpu", "bfloat16", "bfloat16", Sizes(64, 64, 9, 3, table_width=10))
    found = attention_figures(row)
    ends, table = 2 * 16 * 128 * 2, 2 * 128 * 4
    least = 160 * 2048 + 2 * 9 * 64 * 2 + 4 * 10
    assert found["bytes_ratio"] == round((10 * 16 * 2048 + ends + table) / least, 4)
    assert found["layout_ratio"] == round(4 * 128 / (3 * 64), 4)
    # A window that begins within a block has the whole of it read.
    windowed = dataclasses.replace(row, sizes=dataclasses.replace(row.sizes, window=40))
    least = 40 * 2048 + 2 * 9 * 64 * 2 + 4 * 3
    assert attention_figures(windowed)["bytes_ratio"] == round((3 * 16 * 2048 + ends + table) / least, 4)
    # A row of scales fills 16 of 128 lanes.
    scaled = dataclasses.replace(row, kv_format="int8")
    assert attention_figures(scaled)["layout_ratio"] == round(
        (16 * 2 * 512 + 2 * 2048) / (16 * 2 * (3 * 64 + 3 * 4)), 4
    )


def test_a_tpu_kernel_that_takes_more_vmem_than_the_smallest_has_is_named():
    row = Row("decode", "mosaic_tpu", "tpu", "bfloat16", "bfloat16", Sizes(128, 128))
    assert any("bytes of VMEM are taken" in problem for problem in problems(row, {"vmem_bytes": 60 << 20}, None))


def test_temporaries_with_room_for_an_array_of_the_pool_are_named():
    row = Row("append", "mosaic_tpu", "tpu", "bfloat16", "int8", Sizes(128, 128, query_len=64))
    assert any("2.0 times the smallest array" in problem for problem in problems(row, {"pool_share": 2.0}, None))
