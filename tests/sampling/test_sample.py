# SPDX-License-Identifier: Apache-2.0
"""What is drawn: by whom, with which noise, from which distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.rules import ruled_logits
from metrale_jax.sampling.sample import chosen_logprobs, draw, draw_among, drawable, score_rows

VOCAB, STOPS, ROWS = 131, 4, 8


@jax.jit
def jitted_draw(logits, state, positions):
    return draw(ruled_logits(logits, state, positions[:, None]), state, positions)


def sampling(num_rows, **columns):
    """Greedy rows without stops, but for the given columns."""
    empty = {
        "temperature": 0.0,
        "top_n_sigma": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "seed": 0,
        "min_len": 0,
    }
    dtypes = {"top_k": np.int32, "seed": np.uint32, "min_len": np.int32}
    columns.setdefault("stop_ids", [[VOCAB] * STOPS] * num_rows)
    leaves = {
        name: jnp.asarray(np.broadcast_to(np.asarray(columns.get(name, value), dtypes.get(name, np.float32)), num_rows))
        for name, value in empty.items()
    }
    return SamplingState(**leaves, stop_ids=jnp.asarray(columns["stop_ids"], jnp.int32))


def drawn(logits, state, positions):
    where = jnp.asarray(np.broadcast_to(np.asarray(positions, np.int32), len(logits)))
    return np.asarray(jitted_draw(jnp.asarray(logits, jnp.float32), state, where))


def some_logits(num_rows, seed=0):
    return np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32) * 2


def test_a_greedy_row_takes_the_highest_logit_whatever_its_neighbours_ask_for():
    logits = some_logits(ROWS)
    mixed = sampling(
        ROWS, temperature=[0, 1, 0, 5, 1e-6, 0.7, 0, 2], top_k=[3, 1, 0, 5, 9, 0, 1, 0], top_p=0.5, min_p=0.2, seed=3
    )
    tokens = drawn(logits, mixed, range(ROWS))
    for row in (0, 2, 4, 6):
        assert tokens[row] == logits[row].argmax()


def test_a_seed_and_position_give_one_token_whatever_the_row_and_the_neighbours():
    target = some_logits(1)[0]
    for position in (1, 17, 4095):
        seen = set()
        for row in range(ROWS):
            logits = some_logits(ROWS, seed=row + 1)
            logits[row] = target
            columns = {name: np.random.default_rng(row).random(ROWS) for name in ("temperature", "top_p", "min_p")}
            columns["top_p"] += 0.01
            seeds = np.arange(ROWS, dtype=np.uint32) + row
            columns["temperature"][row], columns["top_p"][row], columns["min_p"][row] = 1.3, 0.95, 0.001
            seeds[row] = 77
            positions = np.arange(ROWS) * 3
            positions[row] = position
            seen.add(int(drawn(logits, sampling(ROWS, seed=seeds, **columns), positions)[row]))
        alone = drawn(target[None], sampling(1, temperature=1.3, top_p=0.95, min_p=0.001, seed=77), position)
        assert seen == {int(alone[0])}


def test_other_seeds_and_other_positions_give_other_noise():
    flat = np.zeros((512, VOCAB), np.float32)
    by_seed = drawn(flat, sampling(512, temperature=1, seed=np.arange(512)), 9)
    by_position = drawn(flat, sampling(512, temperature=1, seed=9), range(512))
    largest = drawn(flat, sampling(512, temperature=1, seed=np.arange(2**32 - 512, 2**32)), 9)
    for tokens in (by_seed, by_position, largest):
        assert len(set(tokens.tolist())) > 100
    assert (by_seed == by_position).mean() < 0.1


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 6},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.15},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.1, "top_n_sigma": 1.2},
    {"temperature": 1.0, "typical_p": 0.6},
    {"temperature": 1.3, "top_n_sigma": 2.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
]


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_tokens_follow_the_filtered_softmax(wanted):
    draws = 16384
    row = some_logits(1, seed=5)[0]
    logits = np.broadcast_to(row, (draws, VOCAB))
    tokens = drawn(logits, sampling(draws, seed=np.arange(draws), **wanted), 40)
    probabilities = filtered_softmax(row, **wanted)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[probabilities == 0].any(), "a filtered token was drawn"
    common = probabilities * draws >= 5
    expected = np.append(probabilities[common], probabilities[~common].sum()) * draws
    seen = np.append(counts[common], counts[~common].sum())
    real = expected > 0
    chi_square = ((seen - expected)[real] ** 2 / expected[real]).sum()
    freedom = real.sum() - 1
    # Six standard deviations of the chi-square distribution above its mean: fails by chance less than once in 1e6.
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom) + 6


def filtered_softmax(row, temperature=1.0, top_n_sigma=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    scaled = row.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    if top_n_sigma:
        p[scaled < scaled.max() - top_n_sigma * scaled[scaled > -np.inf].std()] = 0
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p * p.sum()]] = 0
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    if typical_p < 1:
        information = -np.log(np.where(p > 0, p, 1e-300))
        order = np.argsort(np.abs(information - (p * information).sum()))
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= typical_p]] = 0
    return p / p.sum()


def test_stop_ids_are_kept_from_being_drawn_before_the_least_length_only():
    logits = some_logits(ROWS)
    best = logits.argmax(axis=1)
    second = np.argsort(-logits, axis=1)[:, 1]
    stops = np.full((ROWS, STOPS), VOCAB)
    stops[:, 2] = best
    for temperature in (0, 0.01):
        state = sampling(ROWS, temperature=temperature, min_len=[0, 5, 5, 5, 10, 10, 10, 10], stop_ids=stops)
        tokens = drawn(logits * 100, state, [4, 4, 5, 6, 9, 10, 11, 0])
        early = np.array([False, True, False, False, True, False, False, True])
        np.testing.assert_array_equal(tokens, np.where(early, second, best))


def test_an_early_stop_that_is_all_the_mass_leaves_the_rest_to_be_drawn():
    logits = np.full((ROWS, VOCAB), -3.0, np.float32)
    logits[:, 2] = 50
    stops = np.full((ROWS, STOPS), VOCAB)
    stops[:, 0] = 2
    state = sampling(ROWS, temperature=1, top_p=0.9, seed=np.arange(ROWS), min_len=100, stop_ids=stops)
    tokens = drawn(logits, state, 7)
    assert 2 not in tokens
    assert len(set(tokens.tolist())) > 1


@pytest.mark.parametrize("columns", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_n_sigma": 1, "typical_p": 0.5}])
def test_a_row_without_a_token_to_draw_gives_token_0_and_says_so(columns):
    logits = some_logits(4)
    logits[[1, 3]] = -np.inf
    logits[2, 5] = np.nan
    state = sampling(4, temperature=[0, 0, 1, 1], seed=1, **columns)
    tokens = drawn(logits, state, 3)
    assert tokens[0] == logits[0].argmax() and tokens[1] == tokens[3] == 0 and 0 <= tokens[2] < VOCAB
    assert np.asarray(drawable(jnp.asarray(logits))).tolist() == [True, False, True, False]


def test_one_token_left_is_drawn_whatever_the_filters():
    logits = np.full((4, VOCAB), -np.inf, np.float32)
    logits[:, 77] = -3
    state = sampling(
        4, temperature=[0, 1, 1, 9], top_n_sigma=[0, 1, 0, 0.1], top_k=5, top_p=0.5, min_p=1, typical_p=0.1
    )
    assert drawn(logits, state, 3).tolist() == [77] * 4


def test_ranks_count_the_likelier_tokens():
    logits = some_logits(ROWS)
    targets = np.arange(ROWS, dtype=np.int32)
    logits[0, :3] = 50
    logprobs, ranks, ids, top = score_rows(jnp.asarray(logits), jnp.asarray(targets), 2)
    assert np.asarray(ranks).tolist() == [1] + [1 + (row > row[t]).sum() for t, row in enumerate(logits)][1:]
    for got, same in zip(
        (logprobs, ids, top), chosen_logprobs(jnp.asarray(logits), jnp.asarray(targets), 2), strict=True
    ):
        np.testing.assert_array_equal(got, same)


def test_log_probabilities_are_those_of_the_raw_logits():
    logits = some_logits(ROWS)
    tokens = np.arange(ROWS, dtype=np.int32) * 16
    chosen, ids, top = (np.asarray(x) for x in chosen_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 3))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, expected[np.arange(ROWS), tokens], atol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :3]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, axis=1), atol=1e-5)


def test_drawing_among_some_tokens_is_drawing_where_no_other_may_be_drawn():
    ids = np.sort(np.random.default_rng(3).choice(VOCAB, 40, replace=False)).astype(np.int32)
    logits = some_logits(ROWS)
    state = sampling(ROWS, temperature=[0, 1, 0.5, 2, 1, 1, 0, 1.5], top_k=[0, 0, 5, 0, 7, 0, 0, 0], top_p=0.9, seed=4)
    masked = np.full_like(logits, -np.inf)
    masked[:, ids] = logits[:, ids]
    positions = jnp.arange(ROWS, dtype=jnp.int32)
    among = jax.jit(draw_among, static_argnums=2)
    columns = among(jnp.asarray(logits[:, ids]), jnp.asarray(ids), VOCAB, state, positions)
    tokens = jax.jit(draw)(jnp.asarray(masked), state, positions)
    assert ids[np.asarray(columns)].tolist() == tokens.tolist()
    assert len(set(tokens.tolist())) > 3
