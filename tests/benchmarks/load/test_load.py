# SPDX-License-Identifier: Apache-2.0
"""The load driver against the project's own fronts over a scripted service: what it sees, and what it must not miss."""

import json
import subprocess
import sys

import pytest

from benchmarks.load import soak as soak_module
from benchmarks.load import workload
from benchmarks.load.fronts.registry import FRONTS
from benchmarks.load.soak import Soak, run_soak
from benchmarks.load.sweep import Sweep, run_sweep
from tests.benchmarks.load.scripted_server import CrowdService, crowd_server

# Of each front, what a second of a soak is sure to have done.
ALWAYS = {
    "grpc": {"whole", "streamed", "cancelled", "disconnected"},
    "http": {"whole", "streamed", "left", "reset"},
}
SOAK = Soak(streams=12, seconds=1.0, num_known=6, seed=1, max_more_threads=4, max_more_fds=4, max_rss_mib_per_min=1e6)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(workload, "ANSWER_TOKENS", (4, 12))
    monkeypatch.setattr(soak_module, "SETTLE_S", 1.0)
    monkeypatch.setattr(soak_module, "SAMPLE_S", 0.1)


@pytest.mark.parametrize("front", FRONTS)
def test_a_server_that_keeps_the_rules_passes(front, capsys):
    with crowd_server(front, CrowdService(pause_s=0.001)) as server:
        report, broken = run_soak(SOAK, server)
    assert broken == [] and report["faults"] == 0 and report["finished"] > 12
    behaviours = {outcome.split()[0] for outcome in report["outcomes"]}
    assert behaviours >= ALWAYS[front]
    assert report["peak"]["running"] > 1 and report["after"]["running"] == 0
    assert '"finished_a_stream"' in capsys.readouterr().out


@pytest.mark.parametrize("front", FRONTS)
def test_wrong_tokens_and_leaks_are_told(front):
    with crowd_server(front, CrowdService(spoils=9, leaks=True)) as server:
        report, broken = run_soak(SOAK, server)
    assert any("faults that nobody provoked" in rule for rule in broken)
    assert "blocks_used=1 with nobody left" in broken
    assert any("known answer" in text for text in report["fault_texts"])


@pytest.mark.parametrize("front", FRONTS)
def test_a_sweep_measures_what_the_server_does(front, capsys):
    sweep = Sweep(streams=[1, 4], rounds=1, requests_a_stream=2, min_requests=2, deadline_s=10.0, seed=0)
    with crowd_server(front, CrowdService(pause_s=0.005)) as server:
        report, wrong = run_sweep(sweep, server, None)
    one, four = report["rows"]
    assert wrong == [] and one["statuses"] == {"OK": 2} and four["statuses"] == {"OK": 8}
    # On a busy machine tokens come in one piece with others, which took no time of their own.
    assert one["between_ms_p99"] >= 5 and four["tokens_per_s"] > one["tokens_per_s"]
    assert one["goodput_tokens_per_s"] == one["tokens_per_s"] and 0 < four["driver_cpu_share"] < 4
    assert "| streams |" in capsys.readouterr().out


@pytest.mark.parametrize("front", FRONTS)
def test_the_command_runs_a_soak_and_exits_with_its_verdict(front, tmp_path):
    with crowd_server(front, CrowdService()) as server:
        asked = ["--mode", "soak", "--minutes", "0.04", "--streams", "4", "--num-known", "2", "--target", server.target]
        asked += ["--front", front, "--json", str(tmp_path / "out.json")]
        command = [sys.executable, "-m", "benchmarks.serving_load", *asked]
        quiet = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert quiet.returncode == 0, quiet.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["front"], report["mode"], report["broken"]) == (front, "soak", [])
    assert len(report["commit"]) == 40
