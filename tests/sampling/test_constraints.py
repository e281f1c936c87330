# SPDX-License-Identifier: Apache-2.0
"""Masks that the host makes, against sets of ids."""

import numpy as np
import pytest

from metrale_jax.sampling.constraints import (
    BadWords,
    FixedMask,
    all_of,
    bad_word_ids,
    constraint_of,
    fixed_mask,
    full_mask,
    mask_of,
    without,
)
from metrale_jax.sampling.params import SamplingParams

VOCAB = 131


def ids(mask, vocab=VOCAB):
    assert mask.dtype == np.uint32 and mask.shape == (-(-vocab // 32),)
    return {token for token in range(vocab) if mask[token // 32] >> np.uint32(token % 32) & np.uint32(1)}


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 131])
def test_masks_hold_the_ids_that_they_are_made_of(vocab):
    assert ids(full_mask(vocab), vocab) == set(range(vocab))
    some = {0, vocab // 2, vocab - 1}
    assert ids(mask_of(some, vocab), vocab) == some
    assert ids(without(full_mask(vocab), some), vocab) == set(range(vocab)) - some


def test_nobody_writes_to_a_mask_that_is_shared():
    for mask in (full_mask(VOCAB), mask_of([3], VOCAB), without(full_mask(VOCAB), [3])):
        with pytest.raises(ValueError, match="read-only"):
            mask[0] = 1


def banned_by_definition(words, answer):
    return {w[-1] for w in words if len(w) <= len(answer) + 1 and tuple(answer[len(answer) - len(w) + 1 :]) == w[:-1]}


def test_a_bad_word_loses_its_last_token_only_after_the_others():
    rng = np.random.default_rng(0)
    words = [(5,), (0, 1), (1, 1), (0, 1, 2), (2, 0, 1, 0), (1, 2), (1, 2)]
    for _ in range(20):
        rule, answer = BadWords(words, VOCAB), []
        for _ in range(12):
            assert set(range(VOCAB)) - ids(rule.mask()) == banned_by_definition(words, answer)
            answer.append(int(rng.integers(0, 3)))
            rule.accept(answer[-1])


def test_a_fork_goes_its_own_way():
    one = BadWords([(1, 2), (3, 4)], VOCAB)
    one.accept(1)
    two = one.fork()
    two.accept(3)
    assert 2 not in ids(one.mask()) and 4 in ids(one.mask())
    assert 4 not in ids(two.mask()) and 2 in ids(two.mask())


def test_all_of_allows_what_every_part_allows_and_moves_them_all():
    parts = [BadWords([(1, 2)], VOCAB), FixedMask(mask_of([1, 2, 3], VOCAB)), FixedMask(without(full_mask(VOCAB), [3]))]
    both = all_of(parts)
    assert ids(both.mask()) == {1, 2}
    other = both.fork()
    both.accept(1)
    assert ids(both.mask()) == {1}
    assert ids(other.mask()) == {1, 2}
    assert all_of(parts[:1]) is parts[0]


def test_what_never_moves_is_one_mask_and_what_moves_a_constraint():
    assert fixed_mask(SamplingParams(), VOCAB) is None and constraint_of(SamplingParams(), VOCAB) is None
    params = SamplingParams(allowed_token_ids=[1, 2, 3, 4], banned_token_ids=[2])
    assert ids(fixed_mask(params, VOCAB, [(3,), (1, 4)])) == {1, 4}
    assert constraint_of(params, VOCAB, [(3,)]) is None
    moving = constraint_of(params, VOCAB, [(3,), (1, 4)])
    assert ids(moving.mask()) == {1, 4}
    moving.accept(1)
    assert ids(moving.mask()) == {1}
    structured = constraint_of(SamplingParams(banned_token_ids=[9]), VOCAB, (), FixedMask(mask_of([8, 9], VOCAB)))
    assert ids(structured.mask()) == {8}


def test_bad_words_are_spelled_with_and_without_a_space():
    spelled = {"cat": [10], " cat": [11], "a dog": [1, 12], " a dog": [2, 12], "odd": [3, 4], " odd": [5], "": []}
    assert bad_word_ids(["cat", (7, 8), " a dog", "odd"], spelled.__getitem__) == [
        (10,), (11,), (7, 8), (1, 12), (2, 12), (3, 4),
    ]  # fmt: skip
