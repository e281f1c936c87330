# SPDX-License-Identifier: Apache-2.0
"""The bound that a search finds, against filters that sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.sampling.transforms import filter_bound

bound_of = jax.jit(filter_bound)


def kept_by_sorting(row, top_k, top_p, min_p):
    """Which tokens of one row survive top_k, top_p on the rest, min_p, each keeping ties with its last survivor."""
    row = row.astype(np.float64)
    kept = np.ones(len(row), bool)
    if top_k > 0:
        kept &= row >= np.sort(row)[::-1][min(top_k, len(row)) - 1]
    mass = np.where(kept, np.exp(row - row.max()), 0)
    if top_p < 1:
        order = np.argsort(-row, kind="stable")
        reached = np.cumsum(mass[order]) >= top_p * mass.sum()
        kept &= row >= row[order[np.argmax(reached)]]
    return kept & (np.exp(row - row.max()) >= min_p)


def kept_by_bound(rows, top_k, top_p, min_p):
    columns = (np.asarray(x, t) for x, t in ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32)))
    off = jnp.zeros(len(rows), jnp.float32)
    bound = np.asarray(bound_of(jnp.asarray(rows), off, *(jnp.asarray(column) for column in columns)))
    return rows >= bound[:, None]


SETTINGS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (10**6, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (20, 0.8, 0.0),
    (20, 1.0, 0.05),
    (0, 0.95, 0.02),
    (7, 0.6, 0.3),
    (1, 0.01, 1.0),
    (3, 1.0, 0.0),
]


@pytest.mark.parametrize("vocab", [131, 1000])
def test_the_bound_keeps_what_sorting_keeps(vocab):
    rng = np.random.default_rng(vocab)
    for scale in (0.1, 1.0, 8.0, 60.0):
        rows = (rng.normal(size=(len(SETTINGS), vocab)) * scale).astype(np.float32)
        got = kept_by_bound(rows, *zip(*SETTINGS, strict=True))
        for row, setting, kept in zip(rows, SETTINGS, got, strict=True):
            np.testing.assert_array_equal(kept, kept_by_sorting(row, *setting), err_msg=str((scale, setting)))


def test_tokens_tied_with_the_last_survivor_survive():
    rng = np.random.default_rng(0)
    rows = rng.integers(-3, 4, size=(len(SETTINGS), 131)).astype(np.float32)
    got = kept_by_bound(rows, *zip(*SETTINGS, strict=True))
    for row, setting, kept in zip(rows, SETTINGS, got, strict=True):
        np.testing.assert_array_equal(kept, kept_by_sorting(row, *setting), err_msg=str(setting))
    assert (got[1].sum() > 1) and (rows[1][got[1]] == 3).all(), "top_k 1 keeps every copy of the highest"


def test_all_logits_equal_are_all_kept():
    rows = np.zeros((len(SETTINGS), 131), np.float32)
    assert kept_by_bound(rows, *zip(*SETTINGS, strict=True)).all()


@pytest.mark.parametrize("top_p", [1e-7, 1e-30, 1e-40, 1e-50])
def test_however_small_top_p_the_likeliest_token_stays(top_p):
    rng = np.random.default_rng(1)
    rows = np.zeros((len(SETTINGS), 131), np.float32) + rng.normal(size=(len(SETTINGS), 131)).astype(np.float32)
    kept = kept_by_bound(rows, [0] * len(rows), [top_p] * len(rows), [0.0] * len(rows))
    np.testing.assert_array_equal(kept.argmax(axis=1), rows.argmax(axis=1))
    assert (kept.sum(axis=1) == 1).all()


def test_banned_tokens_of_minus_infinity_change_nothing_else():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(len(SETTINGS), 131)).astype(np.float32)
    rows[:, [3, 77, 130]] = -np.inf
    got = kept_by_bound(rows, *zip(*SETTINGS, strict=True))
    for row, setting, kept in zip(rows, SETTINGS, got, strict=True):
        real = np.isfinite(row)
        np.testing.assert_array_equal(kept[real], kept_by_sorting(row[real], *setting), err_msg=str(setting))
