# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads as proposers: answers that they do not change."""

from metrale_jax.speculative.eagle3 import Eagle3
from tests.speculative.head_problems import head_of, random_params
from tests.speculative.solo_problems import assert_solo


def test_answers_are_those_without_drafts(golden, nan_pool):
    model = golden("llama-default", 8)
    head = head_of("eagle3", model.config, 20, (0, 1, 2))
    counts = assert_solo(model, Eagle3(head), random_params(head), names=("sampled",), fill=nan_pool)
    assert 0 < counts[2] < counts[1]
