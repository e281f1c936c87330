# SPDX-License-Identifier: Apache-2.0
"""Figures of a call whose kernel Mosaic GPU compiles: it leaves its PTX in a folder that the environment names."""

import os
import re
import tempfile
import threading
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.static.cuda import REGISTERS, WARP, assembled, count_instructions
from benchmarks.static.rows import Row, arguments
from metrale_jax.aot.targets import Target

FOLDER = "MOSAIC_GPU_DUMP_TO"
_THREADS = re.compile(r"\.maxntid (\d+)")
_ONE_AT_A_TIME = threading.Lock()


def figures(row: Row, target: Target) -> dict:
    """The figures of one row, as they are recorded. Boxes of memory are copied whole: widths of loads say nothing."""
    call, shapes = arguments(row, SingleDeviceSharding(target.devices()[0]))
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            jax.jit(call).lower(*shapes).compile()
        finally:
            del os.environ[FOLDER]
        (path,) = Path(folder).glob("*.ptx")
        text = path.read_text()
        found = {**assembled(path, "sm_90a"), **count_instructions(text)}
    threads = int(_THREADS.search(text).group(1))
    kept = {name: found[name] for name in ("registers", "spill_bytes", "matrix_ops", "instructions")}
    blocks = REGISTERS // (-(-found["registers"] // 8) * 8 * threads)
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\.\d", text))
    return {"threads": threads, **kept, "blocks": blocks, "occupancy": threads * blocks / WARP / 64, "copies": copies}
