# SPDX-License-Identifier: Apache-2.0
"""Recorded figures of compiled kernels: they keep to their limits, cover every kernel, and are read rightly."""

import dataclasses

import pytest

from benchmarks.static.__main__ import TARGETS, load_record, main
from benchmarks.static.cuda import blocks_per_multiprocessor, count_instructions, parse_thunks
from benchmarks.static.gates import problems
from benchmarks.static.rows import ROWS, Row, Sizes, rows_of
from benchmarks.static.tpu import attention_figures
from benchmarks.static.traffic import decode_traffic
from metrale_jax.aot.targets import target_for

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
    """
    found = count_instructions(ptx)
    assert found["matrix_ops"] == {"mma.sync": 1, "wgmma.mma_async": 1}
    assert found["loads"] == {"4": 2, "16": 3}
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
