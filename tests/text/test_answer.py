# SPDX-License-Identifier: Apache-2.0
"""The text of an answer, and the tokens that may end it."""

import pytest

from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.answer import AnswerText
from metrale_jax.text.stops import StopPatterns


def pushed(tokenizer, ids, **params):
    """Text and number of tokens of an answer of `ids` that ends where a stop string is complete."""
    answer = AnswerText(tokenizer, SamplingParams(**params), StopPatterns.of(params.get("stop", ())))
    count = next((count for count, token in enumerate(ids, start=1) if answer.push([token])), len(ids))
    answer.close()
    return answer.whole, count


@pytest.mark.parametrize(
    "min_tokens, expected", [(0, ("", 2)), (1, ("", 2)), (2, ("ab", 4)), (3, ("ab", 4)), (6, ("ababab", 6))]
)
def test_a_stop_string_is_met_where_it_is_complete_after_min_tokens(smollm2, min_tokens, expected):
    ids = [smollm2.encode(letter)[0] for letter in "ababab"]
    assert pushed(smollm2, ids, stop="ab", min_tokens=min_tokens) == expected


def test_a_stop_string_that_began_in_the_free_tokens_is_cut_from_their_text(smollm2):
    ids = [smollm2.encode(letter)[0] for letter in "xyzw"]
    assert pushed(smollm2, ids, stop="yz", min_tokens=2) == ("x", 3)
    assert pushed(smollm2, ids, stop="xy", min_tokens=2) == ("xyzw", 4)
