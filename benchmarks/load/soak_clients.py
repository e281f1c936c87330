# SPDX-License-Identifier: Apache-2.0
"""A process of a soak's streams: they share connections, but for those that end their own."""

import asyncio
import time

from benchmarks.load.fronts.registry import driver_of
from benchmarks.load.sweep_clients import cpu_s
from benchmarks.load.visits import Visit
from benchmarks.load.worker import serve_jobs, settings_of_process


async def soak(settings: dict, job: dict) -> dict:
    """The tallies of the streams numbered in the job, and the CPU seconds of this process."""
    before = cpu_s()
    until_s = time.monotonic() + job["seconds"]
    async with driver_of(settings["front"]).clients(settings["target"]) as clients:
        visits = [Visit(job["known"], f"{job['seed']}-{number}") for number in job["streams"]]
        await asyncio.gather(*(visit.run(clients, until_s) for visit in visits))
    return {"tallies": [vars(visit.tally) for visit in visits], "cpu_s": cpu_s() - before}


if __name__ == "__main__":
    own = settings_of_process()
    serve_jobs("ready", lambda job: asyncio.run(soak(own, job)))
