# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on: processor, cores, and the memory bandwidth and arithmetic that it really gives."""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

BANDWIDTH_BYTES = 1 << 30
MATMUL_WIDTH = 2048
TRIES = 5


def machine_facts() -> dict:
    """Processor, cores, memory, load average, and measured DRAM GB/s and float32 GFLOP/s. Takes seconds."""
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": platform.platform(),
        "load_average": os.getloadavg()[0],
        "dram_gb_per_s": round(_bandwidth(cores), 1),
        "float32_gflop_per_s": round(_arithmetic(), 1),
    }


def _cpu_name() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor())
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"


def _bandwidth(cores: int) -> float:
    """GB/s of reading an array that no cache holds, one thread for each core, best of a few."""
    parts = np.array_split(np.ones(BANDWIDTH_BYTES // 8, np.int64), cores)
    with ThreadPoolExecutor(cores) as threads:
        seconds = _best(lambda: list(threads.map(np.bitwise_or.reduce, parts)))
    return BANDWIDTH_BYTES / seconds / 1e9


def _arithmetic() -> float:
    """GFLOP/s of a square float32 matrix product compiled by XLA, best of a few."""
    matrix = jnp.ones((MATMUL_WIDTH, MATMUL_WIDTH), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    seconds = _best(lambda: product(matrix, matrix).block_until_ready())
    return 2 * MATMUL_WIDTH**3 / seconds / 1e9


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    import json

    print(json.dumps(machine_facts(), indent=2))
