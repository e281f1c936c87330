# SPDX-License-Identifier: Apache-2.0
"""What tells a tie from a fault where answers with drafts part from those without."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.draft_ties import Parting, compared, parting, score_margin, spacing
from metrale_jax import LLM, SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.sampling.sample import draw
from tests.conftest import GOLDENS


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
    state = sampling_state([SamplingRow(params, params.seed, (), 1)], vocab, 1)
    taken = int(draw(jnp.asarray(logits)[None], state, jnp.asarray([position], jnp.int32))[0])
    margins = [score_margin(logits, Parting(0, taken, other), params, position) for other in range(vocab)]
    assert margins.pop(taken) == 0 and min(margins) > 0


def test_another_token_counts_as_a_tie_only_where_its_score_is_near():
    llm = LLM(GOLDENS / "llama-default", max_sequences=1, max_context_tokens=64, kv_cache_mib=1, prefix_cache=False)
    prompt, params = [5, 9, 11], SamplingParams(temperature=0, max_tokens=4, logprobs=20, ignore_eos=True)
    expected = llm.generate(prompt, params)
    row = compared(llm, [prompt], params, expected, expected)
    assert (row["answers_that_differ"], row["unexplained"], row["logprob_shift"]["max"]) == (0, 0, 0)
    [other] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, logprobs=20, logit_bias={70: 100.0}))
    row = compared(llm, [prompt], params, expected, [other])
    assert (row["answers_that_differ"], row["first_tokens_that_differ"], row["unexplained"]) == (1, 1, 1)
    near, distance = row["differences"][0], float(np.subtract(*llm.logits(prompt)[-1][[expected[0].token_ids[0], 70]]))
    assert near["steps"] == pytest.approx(distance / near["spacing"], abs=2e-3) and near["steps"] > 2
