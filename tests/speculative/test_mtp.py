# SPDX-License-Identifier: Apache-2.0
"""Multi-token predictors as proposers: answers that they do not change."""

import pytest

from metrale_jax.speculative.mtp import Mtp
from tests.speculative.head_problems import head_of, random_params
from tests.speculative.solo_problems import assert_solo


@pytest.mark.parametrize("name", ["llama-default", "qwen3-next"])
def test_answers_are_those_without_drafts(golden, nan_pool, name):
    model = golden(name, 8)
    head = head_of("mtp", model.config)
    names = ("greedy", "sampled") if name == "llama-default" else ("sampled",)
    counts = assert_solo(model, Mtp(head), random_params(head), names=names, fill=nan_pool)
    assert counts[0] > 0
