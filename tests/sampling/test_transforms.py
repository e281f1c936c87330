# SPDX-License-Identifier: Apache-2.0
"""The bound that a search finds, against filters that sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.sampling.transforms import filter_bound, typical_interval

bound_of = jax.jit(filter_bound)
interval_of = jax.jit(typical_interval)


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


def test_top_n_sigma_comes_first_and_counts_only_tokens_that_are_not_masked():
    rng = np.random.default_rng(4)
    rows = (rng.normal(size=(8, 131)) * 3).astype(np.float32)
    rows[:, ::3] = -np.inf
    n = np.array([0, 0.1, 0.5, 1, 1.5, 2, 3, 1e6], np.float32)
    for top_k, top_p, min_p in ((0, 1, 0), (12, 1, 0), (0, 0.7, 0), (9, 0.8, 0.05)):
        same = (np.full(8, x, dtype) for x, dtype in ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32)))
        bound = np.asarray(bound_of(jnp.asarray(rows), jnp.asarray(n), *map(jnp.asarray, same)))
        for row, count, least in zip(rows, n, bound, strict=True):
            real = row[np.isfinite(row)].astype(np.float64)
            left = real[real >= real.max() - count * real.std()] if count else real
            expected = left[kept_by_sorting(left, top_k, top_p, min_p)].min()
            assert real[real >= least].min() == expected, (count, top_k)


def typical_by_sorting(row, bound, typical_p):
    """Locally typical sampling as its paper has it, by sorting; ties with the last survivor stay."""
    row = row.astype(np.float64)
    p = np.where(row >= bound, np.exp(row - row.max()), 0)
    p /= p.sum()
    information = -np.log(np.where(p > 0, p, 1))
    distance = np.where(p > 0, np.abs(information - (p * information).sum()), np.inf)
    order = np.argsort(distance, kind="stable")
    last = min(np.sum(np.cumsum(p[order]) < typical_p), len(row) - 1)
    return distance <= distance[order[last]]


@pytest.mark.parametrize("typical_p", [1e-30, 0.05, 0.2, 0.5, 0.9, 0.999])
def test_the_typical_interval_keeps_what_sorting_keeps(typical_p):
    rng = np.random.default_rng(5)
    for scale in (0.1, 1.0, 8.0):
        rows = (rng.normal(size=(8, 131)) * scale).astype(np.float32)
        rows[:, [3, 130]] = -np.inf
        bound = np.where(np.arange(8) % 2, np.sort(rows, axis=1)[:, -40], -np.inf).astype(np.float32)
        centre, radius = interval_of(jnp.asarray(rows), jnp.asarray(bound), jnp.full(8, typical_p, jnp.float32))
        kept = np.abs(rows - np.asarray(centre)[:, None]) <= np.asarray(radius)[:, None]
        for row, least, got in zip(rows, bound, kept & (rows >= bound[:, None]), strict=True):
            np.testing.assert_array_equal(got, typical_by_sorting(row, least, typical_p) & (row >= least))


def test_typical_1_is_off():
    rows = np.random.default_rng(6).normal(size=(8, 131)).astype(np.float32)
    _, radius = interval_of(jnp.asarray(rows), jnp.full(8, -jnp.inf, jnp.float32), jnp.ones(8, jnp.float32))
    assert np.isinf(radius).all()


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
