# SPDX-License-Identifier: Apache-2.0
"""The head over whole texts against a head that drafts from each position alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.speculative.heads import target_features
from metrale_jax.training.loss import acceptance, head_loss
from metrale_jax.training.pack import Text, pack
from metrale_jax.training.unroll import Texts, in_text, unrolled
from tests.speculative.plain_head import KINDS, D, PlainHead, V, config_of, params_of, random_rows

TURNS, L = 3, 16
SIZES = (7, 5, 9)


def lesson():
    """Three texts in two rows, one of them padded, and random rows of the target for them."""
    rng = np.random.default_rng(3)
    texts, place = [], 0
    for size in SIZES:
        texts.append(Text(tuple(rng.integers(0, V, size).tolist()), 2, place))
        place += size
    packed = pack(texts, L)
    assert packed.tokens.shape == (2, L)
    hidden = random_rows(1, place, D)[packed.places]
    captured = tuple(random_rows(seed, place, D)[packed.places] for seed in (2, 3, 4))
    embeds = random_rows(5, V, D)[packed.tokens]
    parts = packed.tokens, packed.positions, packed.owners, packed.asked
    return Texts(*map(jnp.asarray, parts), jnp.asarray(hidden), tuple(map(jnp.asarray, captured)), jnp.asarray(embeds))


def alone(kind, params, features, embeds, start):
    """Outputs of a head that has had the entries up to `start`, and then drafts on."""
    head = PlainHead(kind, params)
    features = [np.zeros(D), *features]
    for position in range(start + 1):
        feedback, output = head.step(features[position], embeds[position])
    outputs = [output]
    for position in range(start + 1, min(start + TURNS, len(embeds))):
        feedback, output = head.step(feedback, embeds[position])
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_every_chain_is_the_one_that_a_head_alone_would_draft(kind):
    config, texts = config_of(kind), lesson()
    params = params_of(config)
    outputs = [np.asarray(rows) for rows in unrolled(config, params, texts, TURNS, "cpu")]
    chains = 0
    for row, owners in enumerate(np.asarray(texts.owners)):
        features = np.asarray(
            target_features(config, params, texts.hidden[row], tuple(part[row] for part in texts.captured))
        )
        for owner in set(owners.tolist()) - {0}:
            (inside,) = np.nonzero(owners == owner)
            first = inside[0]
            for start in range(len(inside)):
                plain = alone(kind, params, features[inside], np.asarray(texts.embeds)[row, inside], start)
                for turn, expected in enumerate(plain):
                    np.testing.assert_allclose(outputs[turn][row, first + start], expected, rtol=2e-3, atol=2e-4)
                    chains += 1
    assert chains == sum(3 * size - 3 for size in SIZES)


def test_guesses_that_are_asked_for_are_of_answers_and_within_their_text():
    texts = lesson()
    for turn in range(TURNS):
        # A chain of turn j begins j places before the token whose successor, in the answer, it guesses.
        expected = sum(max(0, min(size - 2, size - 1 - turn)) for size in SIZES)
        assert int(in_text(texts, turn).sum()) == expected


def test_loss_is_the_cross_entropy_to_the_targets_distribution():
    config, texts = config_of("mtp"), lesson()
    params = params_of(config)
    scorer = random_rows(8, V, D)[np.asarray(params.token_ids)]
    loss, right = head_loss(config, params, texts, jnp.asarray(scorer), 2, "cpu")
    parts, shares = [], []
    for turn, rows in enumerate(unrolled(config, params, texts, 2, "cpu")):
        lost, hits = [], []
        for row, column in zip(*np.nonzero(np.asarray(in_text(texts, turn))), strict=True):
            wanted = scorer @ np.asarray(texts.hidden, np.float64)[row, column + turn]
            scores = np.asarray(params.head, np.float64) @ np.asarray(rows)[row, column]
            chances = np.exp(wanted - wanted.max())
            chances /= chances.sum()
            lost.append(-(chances * (scores - np.log(np.exp(scores).sum()))).sum())
            hits.append(wanted.argmax() == scores.argmax())
        parts.append(np.mean(lost))
        shares.append(np.mean(hits))
    np.testing.assert_allclose(loss, (parts[0] + 0.8 * parts[1]) / 1.8, rtol=1e-4)
    np.testing.assert_allclose(right, shares, rtol=1e-5)


def test_acceptance_counts_chains_as_long_as_they_are_right():
    config, texts = config_of("eagle3"), lesson()
    params = params_of(config)
    whole = random_rows(8, V, D)
    found = acceptance(config, params, texts, jnp.asarray(whole), (), TURNS, "cpu")
    ids = np.asarray(params.token_ids)
    tokens = (np.asarray(texts.hidden) @ whole.T).argmax(axis=-1)
    tried, right = np.zeros(TURNS, int), np.zeros(TURNS, int)
    outputs = [np.asarray(rows) for rows in unrolled(config, params, texts, TURNS, "cpu")]
    asked = [np.asarray(in_text(texts, turn)) for turn in range(TURNS)]
    for row, column in np.ndindex(*texts.tokens.shape):
        for turn in range(TURNS):
            if not asked[turn][row, column]:
                break
            tried[turn] += 1
            guess = ids[(np.asarray(params.head) @ outputs[turn][row, column]).argmax()]
            if guess != tokens[row, column + turn]:
                break
            right[turn] += 1
    np.testing.assert_array_equal(found.tried, tried)
    np.testing.assert_array_equal(found.right, right)
