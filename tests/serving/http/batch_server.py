# SPDX-License-Identifier: Apache-2.0
"""The server over a model that does as it is told, with batches: `python -m tests.serving.http.batch_server DIR MS`."""

import sys
import time

import metrale_jax.llm
from serving.server import serve
from serving.settings_sources import resolve
from tests.serving.core.fake_llm import FakeLLM
from tests.serving.test_metrics import STATS


def main(directory: str, step_ms: str) -> int:
    """The exit status; a step takes so long."""
    llm = FakeLLM(on_step=lambda: time.sleep(float(step_ms) / 1000))
    llm.stats = lambda: STATS
    metrale_jax.llm.LLM = lambda *args, **options: llm
    flags = {"http_port": 0, "grpc_port": 0, "data_dir": directory, "served_name": "fake"}
    return serve(resolve(flags, {}, {}), "none", "grpc").status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
