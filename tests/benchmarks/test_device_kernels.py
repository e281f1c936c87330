# SPDX-License-Identifier: Apache-2.0
"""The command that times kernels on a GPU, as far as a machine without one can run it."""

import json

from benchmarks import device_layers
from benchmarks.device_kernels import CALLS, Timed, main
from benchmarks.device_peers import PEERS


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["--out", str(out)]) == 2
    assert "no GPU; run this on a machine with one" in capsys.readouterr().err
    assert not out.exists()


def test_the_whole_of_it_runs_at_a_tiny_size(tmp_path):
    out = tmp_path / "out.json"
    assert main(["--out", str(out), "--interpret-smoke"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["kernel"] for line in lines} == {"triton-interpreted", *PEERS}
    own = [line for line in lines if line["kernel"] == "triton-interpreted"]
    assert [line["call"].split()[0] for line in own] == [
        *("append", "prefill", "decode"),
        *("grouped_matmul", "conv_rows", "ssd_ragged", "ssd_rows", "gated_delta", "gated_delta_ragged"),
    ]
    assert all(line["us"] > 0 and line["floor_us"] > 0 and line["device"] for line in own)


def test_an_answer_that_is_off_is_named(monkeypatch):
    call = next(call for call in device_layers.CALLS if call.entry == "grouped_matmul").on("cpu", "xla").tiny()
    assert call.fault() == ""
    monkeypatch.setattr(device_layers, "_answer", lambda entry, found: (found + 1,))
    assert "grouped_matmul xla bfloat16/bfloat16 E3-F64-D32 T6 silu-gated: off by 1" in call.fault()


def test_limits_of_layers_are_a_state_read_and_written_and_the_weights_that_are_met():
    delta, ssd, experts = (
        [call for call in device_layers.CALLS if call.entry == entry]
        for entry in ("gated_delta", "ssd_rows", "grouped_matmul")
    )
    tokens = 2 * 16 * 128 * 4 + 2 * 32 * 128 * 4 + 2 * 32 * 4
    assert delta[0].least_bytes == 8 * (2 * 32 * 128 * 128 * 4 + tokens)
    tokens = 80 * 64 * (2 + 4) + 2 * 128 * 2 + 80 * 4
    assert ssd[0].least_bytes == 8 * (2 * 80 * 64 * 128 * 4 + tokens)
    assert experts[0].least_bytes == 2 * (64 * 1536 * 2048 + 64 * (2048 + 768))
    assert experts[0].least_flops == 2 * 64 * 1536 * 2048
    assert len({call.name for call in device_layers.CALLS}) == len(device_layers.CALLS)


def test_limits_are_what_must_be_read_and_multiplied():
    decode = Timed("decode", 64, 4096)
    assert decode.least_bytes == 64 * 4096 * 8 * 128 * 2 * 2 + 2 * 64 * 32 * 128 * 2
    assert Timed("decode", 64, 4096, kv_format="int8").least_bytes == 64 * 4096 * 8 * (128 + 4) * 2 + 2 * 64 * 32 * 256
    assert Timed("prefill", 1, 6, 4).least_flops == 4 * (3 + 4 + 5 + 6) * 32 * 128
    assert len({call.name for call in CALLS}) == len(CALLS)
