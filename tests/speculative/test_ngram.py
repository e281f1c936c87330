# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup against a search in plain Python, and answers that it does not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.speculative.ngram import Ngram, copied
from tests.speculative.solo_problems import assert_solo

LONGEST = 4


def by_hand(known, num_drafts):
    """The longest match of the last tokens, the latest of several, and what follows it round and round."""
    best = (0, 0)
    for end in range(len(known) - 1):
        count = 0
        while count < min(LONGEST, end + 1) and known[end - count] == known[len(known) - 1 - count]:
            count += 1
        best = max(best, (count, end))
    matched, end = best
    cycle = known[end + 1 :]
    return [cycle[i % len(cycle)] for i in range(num_drafts)] if matched else None, matched


def test_drafts_follow_the_longest_and_latest_match():
    rng = np.random.default_rng(0)
    found = jax.jit(partial(copied, num_drafts=5, longest=LONGEST))
    lengths = np.asarray([1, 2, 3, 7, 18, 30, 30, 30], np.int32)
    for _ in range(20):
        known = rng.integers(0, 4, (8, 30)).astype(np.int32)
        drafts, matched = found(jnp.asarray(known), jnp.asarray(lengths))
        for row, length in enumerate(lengths):
            expected, count = by_hand(known[row, :length].tolist(), 5)
            assert matched[row] == count
            if count:
                assert drafts[row].tolist() == expected


def test_answers_are_those_without_drafts(golden, nan_pool):
    steps, proposed, _ = assert_solo(golden("llama-default", 8), Ngram(shortest=1), names=("sampled",), fill=nan_pool)
    assert steps and proposed
