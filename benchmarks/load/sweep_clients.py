# SPDX-License-Identifier: Apache-2.0
"""A process of clients: so many streams at a time, each takes the next request when its last has ended."""

import asyncio
import resource
import time
from collections.abc import Iterator

from benchmarks.load.figures import Trace
from benchmarks.load.fronts.registry import driver_of
from benchmarks.load.worker import serve_jobs, settings_of_process


async def load(settings: dict, job: dict) -> dict:
    """Traces of all requests of a job, and the CPU seconds that this process spent on them."""
    left: Iterator[dict] = iter(job["asks"])
    traces: list[Trace] = []
    async with driver_of(settings["front"]).clients(settings["target"]) as clients:

        async def work() -> None:
            for ask in left:
                traces.append(await clients.stream_one(ask, job["deadline_s"]))

        await clients.connect(job["streams"])  # connections stand before the clock runs
        await asyncio.sleep(max(0.0, job["starts_at_s"] - time.monotonic()))
        before = cpu_s()
        await asyncio.gather(*(work() for _ in range(job["streams"])))
        spent_s = cpu_s() - before
    return {"traces": [vars(trace) for trace in traces], "cpu_s": spent_s}


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    own = settings_of_process()
    serve_jobs("ready", lambda job: asyncio.run(load(own, job)))
