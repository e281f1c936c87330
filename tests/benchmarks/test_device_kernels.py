# SPDX-License-Identifier: Apache-2.0
"""The command that times kernels on a GPU, as far as a machine without one can run it."""

import json

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
    assert [line["call"].split()[0] for line in own] == ["append", "prefill", "decode"]
    assert all(line["us"] > 0 and line["floor_us"] > 0 and line["device"] for line in own)


def test_limits_are_what_must_be_read_and_multiplied():
    decode = Timed("decode", 64, 4096)
    assert decode.least_bytes == 64 * 4096 * 8 * 128 * 2 * 2 + 2 * 64 * 32 * 128 * 2
    assert Timed("decode", 64, 4096, kv_format="int8").least_bytes == 64 * 4096 * 8 * (128 + 4) * 2 + 2 * 64 * 32 * 256
    assert Timed("prefill", 1, 6, 4).least_flops == 4 * (3 + 4 + 5 + 6) * 32 * 128
    assert len({call.name for call in CALLS}) == len(CALLS)
