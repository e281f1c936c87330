# SPDX-License-Identifier: Apache-2.0
"""The step that drafts and verifies: answers are those without drafts, whatever is accepted."""

import pytest

from tests.sometimes import mostly_slow
from tests.speculative.solo_problems import Scripted, assert_solo

MODELS = ["llama-default", "mistral-window", "qwen3-next", "nemotron-h", "phi3-longrope", "gpt-oss"]


@pytest.mark.parametrize("name", mostly_slow(MODELS, always=["qwen3-next"]))
def test_answers_are_those_without_drafts(golden, nan_pool, name):
    steps, proposed, accepted = assert_solo(golden(name, 8), Scripted(), fill=nan_pool)
    assert steps and 0 < accepted < proposed
