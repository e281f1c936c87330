# SPDX-License-Identifier: Apache-2.0
"""Who wants to see that a program is compiled sees it."""

from contextlib import contextmanager

import numpy as np
import pytest

from metrale_jax.steps.build import Steps


def test_each_compile_has_a_context_and_a_program_that_is_there_has_none(golden):
    seen = []

    @contextmanager
    def on_compile(name):
        seen.append(f"begin {name}")
        try:
            yield
        finally:
            seen.append(f"end {name}")

    steps = Steps(golden("llama-default", 8).steps.model, on_compile=on_compile)
    for rows in (2, 3, 2):
        picked = steps.run("pick_rows", np.arange(8.0, dtype=np.float32).reshape(4, 2), np.arange(rows, dtype=np.int32))
        assert picked.shape == (rows, 2)
    assert seen == ["begin pick_rows", "end pick_rows"] * 2
    assert steps.num_compiles == 2
    with pytest.raises(TypeError):
        steps.executable("pick_rows", np.zeros((4, 2), np.float32))
    assert seen[4:] == ["begin pick_rows", "end pick_rows"], "a failure ends it too"
    assert steps.num_compiles == 2
