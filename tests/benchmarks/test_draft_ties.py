# SPDX-License-Identifier: Apache-2.0
"""What tells a tie from a fault where answers with drafts part from those without."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.draft_ties import Parting, compared, parting, score_margin, spacing
from metrale_jax import SamplingParams
from metrale_jax.results import TokenLogprob
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.sampling.sample import draw


@pytest.mark.parametrize("size", [0.75, 1.0, 3.9, 17.25, 300.0])
def test_spacing_is_the_distance_to_the_next_bfloat16_number(size):
    one = jnp.asarray(size, jnp.bfloat16)
    assert spacing(float(one)) == float(jnp.nextafter(one, jnp.asarray(jnp.inf, jnp.bfloat16))) - float(one)


def test_answers_part_where_they_differ_first_or_where_one_ends():
    assert parting([5, 6, 7], [5, 6, 7]) is None
    assert parting([5, 6, 7], [5, 8, 9]) == Parting(1, 6, 8)
    assert parting([5], [5, 8]) == Parting(1, -1, 8)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_drawn_scores_above_all_else(temperature):
    params, vocab, position = SamplingParams(temperature=temperature, seed=3), 40, 11
    logits = np.random.default_rng(2).normal(size=vocab).astype(np.float32)
    state = jax.tree.map(jnp.asarray, sampling_state([SamplingRow(params, params.seed, (), 1)], vocab, 1))
    taken = int(draw(jnp.asarray(logits)[None], state, jnp.asarray([position], jnp.int32))[0])
    margins = [score_margin(logits, Parting(0, taken, other), params, position) for other in range(vocab)]
    assert margins.pop(taken) == 0 and min(margins) > 0


def answer(tokens, top):
    """An answer of these tokens, at each place of which `top` is listed."""
    logprobs = tuple(TokenLogprob(token, top.get(token, -30.0), tuple(top.items())) for token in tokens)
    return SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)


@pytest.mark.parametrize(("margin", "steps", "tie"), [(0.05, 0.4, True), (0.25, 2.0, True), (0.5, 4.0, False)])
def test_another_token_counts_as_a_tie_only_where_its_score_is_near(margin, steps, tie):
    logits = np.zeros((5, 40), np.float32)
    logits[:, 7] = 17.0  # between 16 and 32 bfloat16 numbers are an eighth apart
    top = {7: -0.5, 8: -0.5 - margin}
    llm = SimpleNamespace(logits=lambda tokens: logits[: len(tokens)])
    expected, found = answer([7, 7, 7], top), answer([7, 8, 7], top)
    row = compared(llm, [[3, 4]] * 2, SamplingParams(temperature=0), [expected] * 2, [expected, found])
    assert (row["answers"], row["answers_that_differ"], row["first_tokens_that_differ"]) == (2, 1, 0)
    assert (row["unexplained"], row["widest_margin_in_steps"]) == (int(not tie), steps)
    assert row["differences"][0]["index"] == 1 and row["logprob_shift"]["max"] == 0


def test_an_answer_that_just_ends_earlier_is_never_a_tie():
    llm = SimpleNamespace(logits=lambda tokens: np.ones((len(tokens), 40), np.float32))
    top = {7: -0.5}
    row = compared(llm, [[3]], SamplingParams(temperature=0), [answer([7, 7], top)], [answer([7], top)])
    assert (row["unexplained"], row["widest_margin_in_steps"]) == (1, None)
