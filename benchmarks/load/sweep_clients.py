# SPDX-License-Identifier: Apache-2.0
"""A process of clients: so many streams at a time over one channel, each takes the next request when its last has
ended."""

import asyncio
import resource
import time
from collections.abc import Iterator

from benchmarks.load.figures import Trace
from benchmarks.load.worker import serve_jobs, settings_of_process
from serving.client import AsyncClient, ClientError, RetryPolicy

ONCE = RetryPolicy(max_attempts=1)


async def stream_one(client: AsyncClient, ask: dict, deadline_s: float) -> Trace:
    """One request's trace."""
    trace = Trace(time.monotonic(), [])
    params = {"temperature": 0, "max_tokens": ask["max_tokens"], "ignore_eos": True, "timeout_s": deadline_s}
    try:
        async with client.stream(ask["prompt"], **params) as stream:
            async for piece in stream:
                if piece.token_ids:
                    trace.arrivals.append((time.monotonic(), len(piece.token_ids)))
    except ClientError as error:
        trace.status = error.code
    trace.ended_s = time.monotonic()
    return trace


async def load(target: str, job: dict) -> dict:
    """Traces of all requests of a job, and the CPU seconds that this process spent on them."""
    left: Iterator[dict] = iter(job["asks"])
    traces: list[Trace] = []

    async def work(client: AsyncClient) -> None:
        for ask in left:
            traces.append(await stream_one(client, ask, job["deadline_s"]))

    async with AsyncClient(target, retries=ONCE) as client:
        await client.models()  # the connection stands before the clock runs
        await asyncio.sleep(max(0.0, job["starts_at_s"] - time.monotonic()))
        before = cpu_s()
        await asyncio.gather(*(work(client) for _ in range(job["streams"])))
        spent_s = cpu_s() - before
    return {"traces": [vars(trace) for trace in traces], "cpu_s": spent_s}


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    settings = settings_of_process()
    serve_jobs("ready", lambda job: asyncio.run(load(settings["target"], job)))
