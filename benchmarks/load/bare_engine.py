# SPDX-License-Identifier: Apache-2.0
"""A process that gives the same load to `LLM` itself: the same number of requests at a time, no service between."""

import time
from collections.abc import Iterator

from benchmarks.load.figures import Trace
from benchmarks.load.worker import serve_jobs, settings_of_process
from metrale_jax import LLM, SamplingParams
from metrale_jax.runtime import default_cache_dir


def load(llm: LLM, job: dict) -> dict:
    """Traces of all requests of a job."""
    left: Iterator[dict] = iter(job["asks"])
    traces: list[Trace] = []
    running: list[tuple] = []

    def submit() -> None:
        for ask in left:
            params = SamplingParams(temperature=0, max_tokens=ask["max_tokens"], ignore_eos=True)
            trace = Trace(time.monotonic(), [])
            traces.append(trace)
            running.append((llm.submit(ask["prompt"], params), trace))
            return

    for _ in range(job["streams"]):
        submit()
    while running:
        llm.step()
        now_s = time.monotonic()
        for answer, trace in tuple(running):
            new = answer.num_generated - trace.num_tokens
            if new:
                trace.arrivals.append((now_s, new))
            if answer.finished:
                answer.result()  # text is made of tokens here, too
                trace.ended_s = time.monotonic()
                running.remove((answer, trace))
                submit()
    return {"traces": [vars(trace) for trace in traces]}


if __name__ == "__main__":
    settings = settings_of_process()
    # Programs are kept where the server keeps them.
    kept = {"compile_cache": default_cache_dir() / "programs"}
    engine = LLM(settings["model"], **{**kept, **settings["options"]})
    engine.warm_up()
    serve_jobs({"vocab_size": engine.loaded.config.vocab_size}, lambda job: load(engine, job))
