# SPDX-License-Identifier: Apache-2.0
"""Times this engine and others on the same weights in one run, turn about, and prints a table of ratios.

    python -m benchmarks.compare --peer-python vllm=/envs/vllm/bin/python --peer-python tunix=/envs/tunix/bin/python

Each peer runs in processes of its own, under its own interpreter; one that is not installed is reported as such. Peers
take turns in every round (A B C A B C), so that a machine that drifts drifts for all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from benchmarks.report import NOT_INSTALLED, markdown, summarise

ROOT = Path(__file__).parent.parent
SECONDS_PER_PROCESS = 1800


@dataclass(frozen=True)
class Peer:
    """An engine on one file of weights: `module` is what its interpreter must find, `weights` a key of `Weights`.

    `workloads` are the tasks with many requests that its script can run.
    """

    engine: str
    script: str
    module: str
    weights: str
    workloads: tuple[str, ...] = ()


PEERS = {
    "metrale": Peer("metrale", "metrale_peer.py", "metrale_jax", "hf", ("offline", "prefix")),
    "vllm": Peer("vllm", "vllm_peer.py", "vllm", "hf", ("offline", "prefix")),
    "tunix": Peer("tunix", "tunix_peer.py", "tunix", "hf", ("offline",)),
    "transformers": Peer("transformers", "transformers_peer.py", "transformers", "hf", ("offline",)),
    "llama.cpp-f32": Peer("llama.cpp", "llama_cpp_peer.py", "llama_cpp", "f32"),
    "llama.cpp-q8_0": Peer("llama.cpp", "llama_cpp_peer.py", "llama_cpp", "q8_0"),
    "llama.cpp-q4_1": Peer("llama.cpp", "llama_cpp_peer.py", "llama_cpp", "original"),
}


@dataclass
class Run:
    """A comparison under way: what was asked, where things lie, and what came of it so far."""

    args: argparse.Namespace
    weights: dict[str, Path]
    pythons: dict[str, str]
    work_dir: Path
    lines: list[dict] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def python_of(self, name: str) -> str:
        """The interpreter of a peer: its own, its engine's, or this one."""
        return self.pythons.get(name) or self.pythons.get(PEERS[name].engine) or sys.executable


def main() -> None:
    """Nothing; runs the comparison, writes its JSON and its table, and prints the table."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="compare-") as temporary:
        work_dir = (args.work_dir or Path(temporary)).absolute()
        work_dir.mkdir(parents=True, exist_ok=True)
        run = Run(args, _weights(args.model, work_dir), _pythons(args.peer_python), work_dir)
        record = {"date": date.today().isoformat(), "model": args.model, **_commit(), "machine": _machine()}
        for name in args.peers:
            if not _installed(run, name):
                run.failures[name] = NOT_INSTALLED
        try:
            _measure(run, tempfile.mkdtemp(prefix="cold-", dir=work_dir))
        finally:  # an interrupt keeps what was measured
            _written(record, run, args)


def _written(record: dict, run: Run, args: argparse.Namespace) -> None:
    record |= {"machine_after": _machine(), "settings": _settings(args)}
    record |= {"peers": summarise(run.lines, args.peers), "failures": run.failures, "figures": run.lines}
    out = args.out or ROOT / "benchmarks" / "results" / f"{record['date']}-cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    table = markdown(record)
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias or path of a GGUF model")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="PEER=PATH", help="interpreter of a peer or an engine"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="PEER:KEY=VALUE", help="passed on to one peer's script"
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="turns of decode and prefill for each peer")
    parser.add_argument("--repeats", type=int, default=1, help="samples of each figure in a turn")
    parser.add_argument("--workload-rounds", type=int, default=3, help="turns of offline and prefix, 0 for none")
    parser.add_argument("--start-rounds", type=int, default=3, help="turns of cold and warm start, 0 for none")
    parser.add_argument("--work-dir", type=Path, help="where weights and compiled programs go; kept if given")
    parser.add_argument("--out", type=Path, help="the JSON to write; a table of the same name goes beside it")
    return parser.parse_args()


def _pythons(pairs: Sequence[str]) -> dict[str, str]:
    # Absolute, since peers run in another directory; not resolved, since an environment is known by its own link.
    return {name: str(Path(path).absolute()) for name, path in (pair.split("=", 1) for pair in pairs)}


def _settings(args: argparse.Namespace) -> dict:
    keys = ("sequences", "rounds", "repeats", "workload_rounds", "start_rounds", "option")
    return {key: getattr(args, key) for key in keys}


def _weights(model: str, work_dir: Path) -> dict[str, Path]:
    """The same weights in each form that a peer reads; those not yet in `work_dir` are written there."""
    from metrale_jax.checkpoint.hub import resolve_model
    from metrale_jax.runtime import default_cache_dir

    original = resolve_model(model, default_cache_dir()).absolute()
    paths = {"hf": work_dir / "hf", "f32": work_dir / "f32.gguf", "q8_0": work_dir / "q8_0.gguf"}
    commands = {
        "hf": ("benchmarks.export_hf", str(original), str(paths["hf"])),
        "f32": ("benchmarks.export_gguf", str(original), str(paths["f32"]), "--format", "f32"),
        "q8_0": ("benchmarks.export_gguf", str(original), str(paths["q8_0"]), "--format", "q8_0"),
    }
    for key, command in commands.items():
        if not paths[key].exists():
            subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=_environment())
    return {**paths, "original": original}


def _measure(run: Run, cold_root: str) -> None:
    args, shapes = run.args, ["--sequences", *map(str, run.args.sequences)]
    for name in args.peers:
        _run(run, name, ["tokens", "memory"], run.work_dir / "compiled" / name, [])
    for turn in range(max(args.rounds, args.workload_rounds)):
        for name in args.peers:
            tasks = ["decode", "prefill"] if turn < args.rounds else []
            tasks += PEERS[name].workloads if turn < args.workload_rounds else []
            cache = run.work_dir / "compiled" / name
            if tasks:
                _run(run, name, tasks, cache, [*shapes, "--repeats", str(args.repeats), "--seed", str(turn)])
    for turn in range(args.start_rounds):
        for figure in ("cold start", "warm start"):
            for name in args.peers:
                _run(run, name, ["start"], Path(cold_root) / str(turn) / name, [], rename=figure)


def _run(run: Run, name: str, tasks: list[str], cache: Path, extra: Sequence[str], rename: str | None = None) -> None:
    """Nothing; one process of a peer. Its figures join `run.lines`; after a failure the peer is left out."""
    if name in run.failures:
        return
    cache.mkdir(parents=True, exist_ok=True)
    peer = PEERS[name]
    options = [option.split(":", 1)[1] for option in run.args.option if option.startswith(name + ":")]
    command = [run.python_of(name), str(ROOT / "benchmarks" / "peers" / peer.script), "--task", *tasks]
    command += ["--name", name, "--model", str(run.weights[peer.weights]), "--cache-dir", str(cache), *extra]
    command += [argument for option in options for argument in ("--option", option)]
    print(f"{name}: {rename or ' '.join(tasks)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*command, "--spawned-at", repr(time.time())],
            capture_output=True,
            text=True,
            env=_environment(),
            cwd=run.work_dir,
            timeout=SECONDS_PER_PROCESS,
        )
    except subprocess.TimeoutExpired:
        run.failures[name] = f"{' '.join(tasks)} took more than {SECONDS_PER_PROCESS} s"
        return
    if done.returncode:
        run.failures[name] = f"{' '.join(tasks)} failed: " + "\n".join(done.stderr.strip().splitlines()[-8:])
        print(run.failures[name], file=sys.stderr)
        return
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    run.lines += [line | {"figure": rename} if rename else line for line in lines]


def _environment() -> dict[str, str]:
    # The engines compared need no network, and JAX would otherwise look for other devices first.
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def _installed(run: Run, name: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({PEERS[name].module!r}) is None)"
    try:
        return subprocess.run([run.python_of(name), "-c", probe], env=_environment()).returncode == 0
    except FileNotFoundError:
        return False


def _machine() -> dict:
    command = [sys.executable, "-m", "benchmarks.machine"]
    return json.loads(subprocess.run(command, check=True, cwd=ROOT, env=_environment(), capture_output=True).stdout)


def _commit() -> dict:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": bool(git("status", "--porcelain"))}


if __name__ == "__main__":
    main()
