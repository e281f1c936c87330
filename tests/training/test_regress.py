# SPDX-License-Identifier: Apache-2.0
"""The best linear head is the one that numpy's least squares finds."""

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.training.loss import head_loss
from metrale_jax.training.pack import Text, pack
from metrale_jax.training.regress import linear_start
from metrale_jax.training.unroll import Texts
from tests.speculative.plain_head import EPS, D, V, config_of, params_of, random_rows


def test_the_start_is_the_least_squares_one_and_better_than_chance():
    config = config_of("mtp")
    head, rng = params_of(config), np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(0, V, 40).tolist()), 2, 40 * number) for number in range(30)]
    packed, table = pack(texts, 80), random_rows(1, V, D)
    tokens = np.concatenate([text.tokens for text in texts])
    mixing = random_rows(2, 2 * D, D)
    unit = lambda rows: rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + EPS)  # noqa: E731
    # Rows that are a linear function of the token's embedding and the row before it, and a little noise.
    hidden = random_rows(3, len(tokens), D)
    for place in range(1, len(tokens)):
        if place % 40:
            inputs = np.concatenate([unit(table[tokens[[place]]]), unit(hidden[[place - 1]])], axis=1)
            hidden[place] = inputs[0] @ mixing * 0.3 + 0.1 * hidden[place]
    scorer = table[np.asarray(head.token_ids)]
    started = linear_start(head, packed, hidden, table, EPS, lambda rows: rows @ scorer.T)
    chosen = np.asarray([place for place in range(len(tokens)) if place % 40 and place % 40 < 39])
    inputs = np.concatenate([unit(table[tokens[chosen]]), unit(hidden[chosen - 1])], axis=1)
    expected = np.linalg.lstsq(inputs, hidden[chosen], rcond=None)[0]
    np.testing.assert_allclose(started.fc.weight.T, expected, atol=0.02)
    np.testing.assert_allclose(started.fc.weight.T, mixing * 0.3, atol=0.05)
    assert not started.layer.mixers[0].out.weight.any() and not started.layer.mlp.down.weight.any()
    parts = packed.tokens, packed.positions, packed.owners, packed.asked
    lesson = Texts(*map(jnp.asarray, parts), jnp.asarray(hidden[packed.places]), (), jnp.asarray(table[packed.tokens]))
    lost, right = head_loss(
        config, jax.tree.map(jnp.asarray, started.replace(head=())), lesson, jnp.asarray(scorer), 1, "cpu"
    )
    before, chance = head_loss(config, head.replace(head=()), lesson, jnp.asarray(scorer), 1, "cpu")
    assert lost < before and right[0] > 0.6 > 0.3 > chance[0]
