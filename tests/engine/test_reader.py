# SPDX-License-Identifier: Apache-2.0
"""What a request is told that ends for a reason of its own."""

from types import SimpleNamespace

import pytest

from metrale_jax.engine.reader import _nothing_to_draw
from metrale_jax.sampling.params import SamplingParams


@pytest.mark.parametrize(
    "params, way_out",
    [
        ({"allowed_token_ids": [3]}, "loosen its masks or bad words"),
        ({"regex": "a+"}, "let allowed_token_ids, banned_token_ids and bad_words leave what its structure needs"),
    ],
)
def test_a_request_with_nothing_to_draw_is_told_where_and_what_bars_it(params, way_out):
    request = SimpleNamespace(request_id=3, num_tokens=5, params=SamplingParams(**params))
    told = str(_nothing_to_draw(request))
    assert told == f"request 3: its rules allow no token after 5 tokens of prompt and answer; {way_out}."
