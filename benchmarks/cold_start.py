# SPDX-License-Identifier: Apache-2.0
"""From the start of the images' entry point until the server takes calls, with and without programs that it ships.

    python -m benchmarks.cold_start --model smollm2-135m --json benchmarks/results/DATE-cold-start.json

Runs `deploy/entrypoint serve` as an image does, in a process of its own with directories of its own: *empty* compiles
everything and keeps nothing from before, *shipped* finds what `metrale-jax warm` made, *at once* is `--no-warm-up` with
an empty directory. Files are in the operating system's cache in all of them. Prints JSON lines.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks.machine import machine_facts

ROOT = Path(__file__).parent.parent
ENTRY_POINT = ROOT / "deploy" / "entrypoint"
VARIANTS = ("shipped", "at once", "empty")
DEADLINE_S = 1800.0
TICK_S = 0.01


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process until its side port answered, until it was ready (and of processor time
    until then, which other work on the machine does not change), and from SIGTERM until its end; how many programs it
    compiled or read, and the most memory that it had, in MiB."""

    answers_s: float
    ready_s: float
    ready_cpu_s: float
    stops_s: float
    programs: int
    peak_mib: float
    load_average: float


def main() -> int:
    """Times all variants, round by round, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--flag", action="append", default=[], help="of serve and warm, as in --flag=--max-sequences=8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="all unless said")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    variants = arguments.variant or VARIANTS
    # So that the server ends with this one.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    record = {"date": date.today().isoformat(), "model": arguments.model, "flags": arguments.flag, "commit": _commit()}
    record |= {"versions": {name: version(name) for name in ("jax", "jaxlib")}, "machine": machine_facts()}
    starts: dict[str, list[Start]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as directory:
        shipped = Path(directory) / "shipped"
        if "shipped" in variants:
            record["warm"] = _warm(arguments.model, arguments.flag, shipped)
            print(json.dumps({"warm": record["warm"]}), flush=True)
        for number in range(arguments.rounds):
            for name in variants:
                own = Path(directory) / f"{number}-{name.replace(' ', '-')}"
                flags = [*arguments.flag, *(["--no-warm-up"] if name == "at once" else [])]
                start = timed(arguments.model, flags, own, shipped if name == "shipped" else own / "none")
                starts[name].append(start)
                print(json.dumps({"variant": name} | asdict(start)), flush=True)
    record["starts"] = {name: list(map(asdict, found)) for name, found in starts.items()}
    for figure in ("ready_s", "ready_cpu_s"):
        record[f"median_{figure}"] = {
            name: round(median(getattr(one, figure) for one in found), 2) for name, found in starts.items()
        }
    record["load_average_after"] = os.getloadavg()[0]
    print(json.dumps({name: record[name] for name in ("median_ready_s", "median_ready_cpu_s")}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def timed(model: str, flags: list[str], directory: Path, shipped: Path) -> Start:
    """One start and one stop. Raises `RuntimeError` where the server ends or is not ready in time."""
    directory.mkdir()
    port = _free_port()
    command = [ENTRY_POINT, "serve", model, "--grpc-port", "0", "--side-port", str(port), *flags]
    load_average, began = os.getloadavg()[0], time.monotonic()
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, env=_environment(directory, shipped), stderr=log)
    answers_s, status = 0.0, None
    try:
        while status != 200:
            if process.poll() is not None or time.monotonic() - began > DEADLINE_S:
                raise RuntimeError(f"not ready: {(directory / 'log').read_text()[-2000:]}")
            time.sleep(TICK_S)
            status, _ = _asked(port, "/ready")
            answers_s = answers_s or (status is not None and time.monotonic() - began)
        ready_s, ready_cpu_s = time.monotonic() - began, _cpu_s(process.pid)
        _, metrics = _asked(port, "/metrics")
        stopping = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, ending, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ending)
        if process.returncode:
            raise RuntimeError(f"ended with {process.returncode}: {(directory / 'log').read_text()[-2000:]}")
        programs = int(float(_value(metrics, "metrale_programs_compiled_total")))
        stops_s, peak_mib = time.monotonic() - stopping, usage.ru_maxrss / 1024
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    seconds = (round(value, 3) for value in (answers_s, ready_s, ready_cpu_s, stops_s))
    return Start(*seconds, programs, round(peak_mib), load_average)


def _warm(model: str, flags: list[str], directory: Path) -> dict:
    began = time.monotonic()
    command = ["metrale-jax", "warm", model, *flags, "--compile-cache", str(directory)]
    done = subprocess.run(command, env=_environment(directory, directory), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    files = [path.stat().st_size for path in directory.iterdir()]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "files": len(files),
        "mib": round(sum(files) / 2**20, 1),
        "says": done.stdout.strip(),
    }


def _cpu_s(pid: int) -> float:
    """Processor time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment(directory: Path, shipped: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("METRALE_", "JAX_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", "")])
    return own | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "METRALE_COMPILE_CACHE": str(directory / "programs"),
        "SHIPPED_PROGRAMS": str(shipped),
    }


def _asked(port: int, path: str) -> tuple[int | None, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return None, ""


def _value(metrics: str, name: str) -> str:
    return next(line.split()[1] for line in metrics.splitlines() if line.startswith(f"{name} "))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
