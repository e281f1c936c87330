# SPDX-License-Identifier: Apache-2.0
"""A process of a soak's streams: they share a connection, but for those that end their own."""

import asyncio
import time

from benchmarks.load.soak_streams import ONCE, Visitor
from benchmarks.load.sweep_clients import cpu_s
from benchmarks.load.worker import serve_jobs, settings_of_process
from serving.client import AsyncClient


async def soak(target: str, job: dict) -> dict:
    """The tallies of the streams numbered in the job, and the CPU seconds of this process."""
    before = cpu_s()
    until_s = time.monotonic() + job["seconds"]
    async with AsyncClient(target, retries=ONCE) as client:
        visitors = [Visitor(client, target, job["known"], f"{job['seed']}-{number}") for number in job["streams"]]
        await asyncio.gather(*(visitor.run(until_s) for visitor in visitors))
    return {"tallies": [vars(visitor.tally) for visitor in visitors], "cpu_s": cpu_s() - before}


if __name__ == "__main__":
    settings = settings_of_process()
    serve_jobs("ready", lambda job: asyncio.run(soak(settings["target"], job)))
