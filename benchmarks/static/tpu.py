# SPDX-License-Identifier: Apache-2.0
"""Figures of a call compiled for a TPU that is not here, by its compiler's own analyses."""

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.static.rows import Row, arguments, donated
from metrale_jax.aot.targets import Target


def figures(row: Row, target: Target) -> dict:
    """The figures of one row, as they are recorded."""
    call, shapes = arguments(row, SingleDeviceSharding(target.devices()[0]))
    compiled = jax.jit(call, donate_argnums=donated(row)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    return {"temp_bytes": memory.temp_size_in_bytes, "code_bytes": memory.generated_code_size_in_bytes}
