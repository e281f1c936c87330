# SPDX-License-Identifier: Apache-2.0
"""The server under load: started here or found running, and what its process and its metrics say of it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from benchmarks.load.fronts.api import AbstractDriver
from benchmarks.load.fronts.registry import FRONTS, driver_of

START_S = 600
STOP_S = 60
POLL_S = 0.2
# What the load asks for is meant to be answered, not turned away.
ALL_MAY_WAIT = ("--max-waiting-requests", "0", "--max-waiting-tokens", "0")
METRIC = re.compile(r"^(metrale_\w+)(\{[^}]*\})? ([-+.\w]+)$", re.MULTILINE)
GAUGES = {
    'metrale_kv_blocks{state="used"}': "blocks_used",
    "metrale_requests_running": "running",
    "metrale_requests_waiting": "waiting",
    "metrale_requests_prefilling": "prefilling",
    "metrale_snapshots_used": "snapshots_used",
}


@dataclass
class Server:
    """Where the `front` of a server is. `pid` and `side_url` (of its metrics) may be unknown: then they tell
    nothing."""

    front: str
    target: str
    side_url: str = ""
    pid: int | None = None
    log: deque = field(default_factory=lambda: deque(maxlen=50))

    @property
    def driver(self) -> AbstractDriver:
        """How it is spoken to."""
        return driver_of(self.front)

    def sample(self) -> dict:
        """How it stands: resident MiB, threads, open files, CPU seconds; of its metrics what is in `GAUGES`; `silent`
        where there was no answer."""
        found = {"at_s": time.monotonic()}
        try:
            if self.pid is not None:
                found |= process_sample(self.pid)
            if self.side_url:
                found |= self.gauges()
        except OSError:
            found["silent"] = True
        return found

    def gauges(self) -> dict[str, float]:
        """The figures of `GAUGES` that its metrics have."""
        with urlopen(f"{self.side_url}/metrics", timeout=10) as page:
            text = page.read().decode()
        values = {f"{name}{labels or ''}": float(value) for name, labels, value in METRIC.findall(text)}
        return {short: values[name] for name, short in GAUGES.items() if name in values}


def process_sample(pid: int) -> dict:
    """What /proc says of a process."""
    root = Path(f"/proc/{pid}")
    status = dict(re.findall(r"^(\w+):\s+(\d+)", (root / "status").read_text(), re.MULTILINE))
    # The fields after the name in brackets; user and system time are the 14th and 15th of all.
    fields = (root / "stat").read_text().rpartition(")")[2].split()
    return {
        "rss_mib": round(int(status["VmRSS"]) / 1024, 2),
        "threads": int(status["Threads"]),
        "fds": len(os.listdir(root / "fd")),
        "cpu_s": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    }


@contextmanager
def started(front: str, model: str, arguments: Sequence[str]) -> Iterator[Server]:
    """A server of its own process, all its fronts on free ports of this machine. Raises `RuntimeError` where it does
    not come up."""
    command = [sys.executable, "-m", "metrale_jax", "serve", model, "--side-port", str(_free_port())]
    ports = [part for name in FRONTS for part in (f"--{name}-port", "0")]
    process = subprocess.Popen([*command, *ports, *ALL_MAY_WAIT, *arguments], stderr=subprocess.PIPE, text=True)
    server = Server(front, "", pid=process.pid)
    told = threading.Event()
    reader = threading.Thread(target=_follow, args=(process, server, told), daemon=True)
    reader.start()
    try:
        if not told.wait(START_S) or not server.target:
            raise RuntimeError("the server did not say where it listens:\n" + "".join(server.log))
        await_serving(server, lambda: process.poll() is None)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(STOP_S)


def await_serving(server: Server, runs: Callable[[], bool] = lambda: True) -> None:
    """Comes back when the server takes calls. Raises `RuntimeError` where it does not within `START_S`, or is gone."""
    ends_at_s = time.monotonic() + START_S
    while runs() and time.monotonic() < ends_at_s:
        if server.driver.serves(server.target, POLL_S * 10):
            return
        time.sleep(POLL_S)
    raise RuntimeError("the server does not serve:\n" + "".join(server.log))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _follow(process: subprocess.Popen, server: Server, ready: threading.Event) -> None:
    """Keeps the end of its log, and finds in it where it listens."""
    for line in process.stderr:
        server.log.append(line)
        if not server.target and (found := addresses(line, server.front)):
            server.target, server.side_url = found
            ready.set()
    process.stderr.close()
    ready.set()


def addresses(line: str, front: str) -> tuple[str, str] | None:
    """Target of the front and URL of the side port from the line of the log that names both, else None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not {front, "side"} <= set(record):
        return None
    return str(record[front]), f"http://{record['side']}" if record["side"] else ""
