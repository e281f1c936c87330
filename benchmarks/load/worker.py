# SPDX-License-Identifier: Apache-2.0
"""Processes that do a part of the work: a line of JSON for each job to them, and one back for its result."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Worker:
    """A module of this package that runs as a process of its own. A context manager, whose end ends the process."""

    def __init__(self, module: str, settings: dict):
        command = [sys.executable, "-m", f"benchmarks.load.{module}", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.result()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def start(self, job: dict) -> None:
        """Sends a job."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What it answers next. Raises `RuntimeError` where it has died instead."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the load ended with {self._process.wait()}; its stderr says why.")
        return json.loads(line)


def serve_jobs(hello: Any, work: Callable[[dict], Any]) -> None:
    """The other side: says `hello`, then does a job for each line until there are none."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), flush=True)


def settings_of_process() -> dict:
    """What the process was started with."""
    return json.loads(sys.argv[1])
