# SPDX-License-Identifier: Apache-2.0
"""Steps over recurrent state write its slots in place: what they need beside the pool follows their rows."""

import jax
import numpy as np
import pytest

from tests.conftest import nan_fill
from tests.models.test_hybrids import DRAFTS, ROWS, SLOTS, TOKENS, WIDTH, Hybrid


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1-norm"])
@pytest.mark.parametrize("step", ["decode", "verify", "prefill"])
def test_more_slots_cost_a_step_no_more_memory(name, step, golden):
    hybrid = Hybrid(golden(name))
    state = hybrid.batch([hybrid.sequence()])
    lens = np.ones(ROWS, np.int32)
    rest = {
        "decode": (),
        "verify": (np.zeros((ROWS, DRAFTS), np.int32), lens),
        "prefill": (np.zeros(TOKENS, np.int32), lens),
    }
    temporaries = []
    for num_slots in (SLOTS, 50 * SLOTS):
        pool = hybrid.steps.make_pool((ROWS * WIDTH + 1,) * len(hybrid.layout.groups), nan_fill, num_slots)
        compiled = hybrid.steps.executable(step, golden(name).params, pool, state, *rest[step], num_logprobs=0)
        figures = compiled.memory_analysis()
        assert figures.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(pool.slot_groups))
        temporaries.append(figures.temp_size_in_bytes)
    assert temporaries[1] - temporaries[0] < hybrid.layout.bytes_per_slot, "no copy of the slots"
