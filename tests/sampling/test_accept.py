# SPDX-License-Identifier: Apache-2.0
"""How many drafts stand under each rule, and that answers have the distribution that the rule promises.

The target and the drafter of the distribution tests are Markov chains: a table of logits by last token. All batches
have one shape, so that each rule is compiled once.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.accept import (
    ACCEPTANCE_RULES,
    DELTA,
    EPSILON,
    acceptance_rule,
    accepted_lengths,
    exact,
    rejection,
    typical,
)
from metrale_jax.sampling.sample import draw
from tests.sampling.test_sample import filtered_softmax

WIDTH, ROWS = 5, 4
ROW = st.tuples(
    st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH),
    st.integers(0, WIDTH),
    st.lists(st.integers(0, 1), min_size=WIDTH + 1, max_size=WIDTH + 1),
)


def counted(drafts, draft_len, targets):
    for index in range(draft_len):
        if drafts[index] != targets[index]:
            return index
    return draft_len


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ROW, min_size=ROWS, max_size=ROWS))
def test_drafts_stand_up_to_the_first_that_differs(rows):
    drafts, lens, targets = (np.asarray(column, np.int32) for column in zip(*rows, strict=True))
    got = accepted_lengths(jnp.asarray(drafts), jnp.asarray(lens), jnp.asarray(targets))
    assert np.asarray(got).tolist() == [counted(*row) for row in rows]


def test_no_drafts_are_no_accepted_drafts():
    got = accepted_lengths(jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32), jnp.ones((3, 1), jnp.int32))
    assert np.asarray(got).tolist() == [0, 0, 0]


def test_rules_are_found_by_name_and_warn_of_what_they_change():
    assert {name: acceptance_rule(name).accept for name in ACCEPTANCE_RULES} == {
        "exact": exact,
        "rejection": rejection,
        "typical": typical,
    }
    assert not acceptance_rule("exact").warning
    assert "keeps the distribution" in acceptance_rule("rejection").warning
    assert "changes the distribution of answers" in acceptance_rule("typical").warning
    assert [rule.needs_scores for rule in ACCEPTANCE_RULES.values()] == [False, True, False]
    for unknown in ("greedy", "", "Exact"):
        with pytest.raises(ConfigError, match="is not one of exact, rejection, typical; choose one"):
            acceptance_rule(unknown)


VOCAB, J, SEEDS, ROUNDS = 11, 2, 2048, 3
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]
NUM_ROWS = SEEDS * len(SETTINGS)
ALL_FILTERS = {"temperature": 1.5, "top_n_sigma": 1.5, "top_k": 7, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9}
OFF = {"temperature": 0.0, "top_n_sigma": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
RULES = {name: jax.jit(rule.accept) for name, rule in ACCEPTANCE_RULES.items()}
jitted_draw = jax.jit(draw)


def sampling_rows(each, seeds):
    """A `SamplingState` with a row for each of `each`, a list of settings."""
    columns = {
        name: jnp.asarray([row.get(name, value) for row in each], jnp.int32 if name == "top_k" else jnp.float32)
        for name, value in OFF.items()
    }
    stops = jnp.full((len(each), 1), VOCAB, jnp.int32)
    return SamplingState(
        **columns, seed=jnp.asarray(seeds, jnp.uint32), min_len=jnp.zeros(len(each), jnp.int32), stop_ids=stops
    )


def drawn_at(ruled, sampling, positions):
    """What the target draws from `[S, J + 1, V]` logits."""
    columns = (jitted_draw(ruled[:, place], sampling, positions[:, place]) for place in range(J + 1))
    return jnp.stack(tuple(columns), axis=1)


def proposed(drafter, last, sampling, positions, certain):
    """`J` drafts after `last` and the scores they were drawn from, or `()` for the likeliest ones."""
    drafts, scores = [], []
    for offset in range(J):
        row = drafter[last]
        last = (
            jnp.argmax(row, axis=-1).astype(jnp.int32) if certain else jitted_draw(row, sampling, positions[:, offset])
        )
        drafts.append(last)
        scores.append(row)
    return jnp.stack(drafts, axis=1), () if certain else jnp.stack(scores, axis=1)


def answers(accept, certain, target, drafter, sampling):
    """The first tokens of each row, speculated upon."""
    rows = jnp.arange(NUM_ROWS, dtype=jnp.int32)
    # Some rows have fewer drafts than there is place for.
    lens = jnp.where(sampling.seed % 4 == 0, J - 1, J).astype(jnp.int32)
    tokens = jnp.zeros((NUM_ROWS, 1 + ROUNDS * (J + 1)), jnp.int32)
    length = jnp.ones(NUM_ROWS, jnp.int32)
    for _ in range(ROUNDS):
        last = tokens[rows, length - 1]
        positions = length[:, None] + jnp.arange(J + 1, dtype=jnp.int32)
        drafts, scores = proposed(drafter, last, sampling, positions, certain)
        ruled = target[jnp.concatenate([last[:, None], drafts], axis=1)]
        drawn = drawn_at(ruled, sampling, positions)
        new, accepted = accept(drafts, lens, drawn, ruled.reshape(-1, VOCAB), scores, sampling, positions)
        tokens = tokens.at[rows[:, None], positions].set(new)
        length = length + accepted + 1
    return np.asarray(tokens)[:, 1 : 1 + ROUNDS]


def chains():
    """A target's table, and the drafters' by name: one near it and one that knows nothing of it."""
    rng = np.random.default_rng(3)
    target = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
    good = target + rng.normal(size=target.shape).astype(np.float32) * 0.5
    bad = rng.normal(size=target.shape).astype(np.float32) * 1.5
    # The target may not draw token 1, nor the bad drafter 2 and 3.
    target[:, 1] = bad[:, 2] = bad[:, 3] = -np.inf
    return target, {"good": (good, False), "bad": (bad, False), "certain": (good, True)}


TARGET, DRAFTERS = chains()


@cache
def sampled_answers(accept, drafter, reverse=False):
    """Tokens of `SEEDS` rows for each of the settings, `[settings, seeds, tokens]`; computed in reverse if asked."""
    table, certain = DRAFTERS[drafter]
    order = np.arange(NUM_ROWS)[:: -1 if reverse else 1]
    state = sampling_rows([SETTINGS[row // SEEDS] for row in order], order % SEEDS)
    tokens = answers(accept, certain, jnp.asarray(TARGET), jnp.asarray(table), state)
    return tokens[order].reshape(len(SETTINGS), SEEDS, -1)


def chi_squared_chance(seen, expected):
    """The chance of counts at least so far from what is expected (Pearson); 0 where the impossible was seen."""
    if seen[expected == 0].any():
        return 0.0
    common = expected >= 5
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(jax.scipy.stats.chi2.sf(np.float32(statistic), np.float32(len(seen) - 1)))


def least_chance(tokens, wanted):
    """Of the first two tokens together, and of the second and third, against the target's own distribution."""
    rows = np.stack([filtered_softmax(row, **wanted) for row in TARGET])
    chances = []
    for pair, last in ((tokens[:, :2], rows[0]), (tokens[:, 1:3], rows[0] @ rows)):
        seen = np.bincount(pair[:, 0] * VOCAB + pair[:, 1], minlength=VOCAB**2)
        chances.append(chi_squared_chance(seen, (last[:, None] * rows).ravel() * len(tokens)))
    return min(chances)


def chances_of(accept, drafter):
    tokens = sampled_answers(accept, drafter)
    return [least_chance(*pair) for pair in zip(tokens, SETTINGS, strict=True)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["exact", "rejection"])
def test_answers_have_the_distribution_of_the_target(name, drafter):
    chances = chances_of(RULES[name], drafter)
    assert min(chances) > 1e-4, chances


def always(drafts, draft_lens, drawn, *_):
    place = jnp.arange(J + 1) < draft_lens[:, None]
    return jnp.where(place, jnp.pad(drafts, ((0, 0), (0, 1))), drawn), draft_lens


def drawn_again(drafts, draft_lens, drawn, ruled, scores, sampling, positions):
    """Rejection with a common mistake: the token in place of a draft comes from `p`, not from what is left of it."""
    other = drawn_at(ruled.reshape(*drawn.shape, VOCAB), sampling.replace(seed=sampling.seed + 2**20), positions)
    tokens, accepted = RULES["rejection"](drafts, draft_lens, drawn, ruled, scores, sampling, positions)
    return jnp.where(jnp.arange(J + 1) == accepted[:, None], other, tokens), accepted


def shares(scores):
    return jax.nn.softmax(scores, axis=-1)


def choosy(drafts, draft_lens, drawn, ruled, scores, sampling, positions):
    """Rejection after leaving out the drafts that turned out unlikely: what is left is not drawn from `q`."""
    likely = jnp.take_along_axis(shares(scores), drafts[..., None], axis=-1)[..., 0] > 0.3
    lens = jnp.minimum(draft_lens, jnp.cumprod(likely, axis=1).sum(axis=1).astype(jnp.int32))
    return RULES["rejection"](drafts, lens, drawn, ruled, scores, sampling, positions)


def cautious(drafts, draft_lens, drawn, ruled, scores, sampling, positions):
    """Rejection with as many drafts as the drafter was sure of before it drew them, which is as good as any number."""
    sure = jnp.max(shares(scores), axis=-1) > 0.4
    lens = jnp.minimum(draft_lens, jnp.cumprod(sure, axis=1).sum(axis=1).astype(jnp.int32))
    return RULES["rejection"](drafts, lens, drawn, ruled, scores, sampling, positions)


@pytest.mark.parametrize(
    ("wrong", "drafter"),
    [(always, "good"), (always, "certain"), (drawn_again, "bad"), (drawn_again, "certain"), (choosy, "bad")],
)
def test_wrong_rules_are_found_out(wrong, drafter):
    chances = chances_of(wrong, drafter)
    assert min(chances) < 1e-9, chances


def test_the_number_of_drafts_may_depend_on_scores_but_not_on_the_drafts():
    chances = chances_of(cautious, "bad")
    assert min(chances) > 1e-4, chances


def never(drafts, draft_lens, drawn, *_):
    return drawn, jnp.zeros_like(draft_lens)


def test_the_exact_rule_gives_the_plain_stream_and_rejection_the_same_one_each_time():
    plain = sampled_answers(never, "certain")
    for drafter in DRAFTERS:
        np.testing.assert_array_equal(sampled_answers(RULES["exact"], drafter), plain)
    whole = sampled_answers(RULES["rejection"], "good")
    assert (whole != plain).any()
    # A row's place and neighbours change nothing.
    np.testing.assert_array_equal(sampled_answers(RULES["rejection"], "good", reverse=True), whole)


def repeated_to_the_end(rows, dtype):
    """`rows` over and over, `NUM_ROWS` in all."""
    rows = np.asarray(rows, dtype)
    return jnp.asarray(rows[np.arange(NUM_ROWS) % len(rows)])


def random_pairs(num_pairs):
    rng = np.random.default_rng(11)
    p, q = (rng.normal(size=(num_pairs, VOCAB)) * 1.5 for _ in range(2))
    near = np.linspace(0, 1, num_pairs, endpoint=False)[:, None]
    return p.astype(np.float32), (near * p + (1 - near) * q).astype(np.float32)


def test_rejection_accepts_what_the_distributions_share_and_exact_what_coupled_noise_does():
    num_pairs = 8
    pairs = random_pairs(num_pairs)
    p, q = (repeated_to_the_end(leaf, np.float32) for leaf in pairs)
    state = sampling_rows([{"temperature": 1.0}] * NUM_ROWS, np.arange(NUM_ROWS))
    positions = repeated_to_the_end([[7, 8, 9]], np.int32)
    drafts = jnp.stack([jitted_draw(q, state, positions[:, offset]) for offset in range(J)], axis=1)
    ruled, scores = (jnp.repeat(leaf[:, None], width, axis=1) for leaf, width in ((p, J + 1), (q, J)))
    drawn, ruled = drawn_at(ruled, state, positions), ruled.reshape(-1, VOCAB)
    share = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in pairs]
    best = np.minimum(*share).sum(axis=1)
    coupled = (1 / np.maximum(*(x[:, None, :] / x[:, :, None] for x in share)).sum(axis=2)).sum(axis=1)
    assert (coupled < best).all() and (coupled > best / (2 - best)).all() and (best - coupled).mean() > 0.03
    for name, wanted in (("rejection", best), ("exact", coupled)):
        lens = jnp.ones(NUM_ROWS, jnp.int32)
        accepted = np.asarray(RULES[name](drafts, lens, drawn, ruled, scores, state, positions)[1])
        rates = accepted.reshape(-1, num_pairs).mean(axis=0)
        deviation = np.sqrt(wanted * (1 - wanted) / (NUM_ROWS // num_pairs))
        assert (np.abs(rates - wanted) < 4.5 * deviation).all(), (name, rates, wanted)
        assert abs((rates - wanted).mean()) < 4.5 * np.sqrt((deviation**2).sum()) / num_pairs < 0.03


def first_draft(accept, cases):
    """For each case, a dict, whether its first `draft` stands and the token that follows or replaces it.

    `p` and `q` are probabilities of target and drafter, `drawn` what the target draws at both positions; `q` is given
    by all cases or by none.
    """

    def padded(p):
        with np.errstate(divide="ignore"):
            return np.log(np.asarray([*p, *[0] * (VOCAB - len(p))], np.float32))

    each = [cases[row % len(cases)] for row in range(NUM_ROWS)]
    ruled = repeated_to_the_end([[padded(case["p"])] * (J + 1) for case in cases], np.float32).reshape(-1, VOCAB)
    scores = ()
    if "q" in cases[0]:
        scores = repeated_to_the_end([[padded(case["q"])] * J for case in cases], np.float32)
    tokens, accepted = accept(
        repeated_to_the_end([[case["draft"]] * J for case in cases], np.int32),
        jnp.ones(NUM_ROWS, jnp.int32),
        repeated_to_the_end([[*case["drawn"], 0] for case in cases], np.int32),
        ruled,
        scores,
        sampling_rows([{"temperature": 1.0, **case.get("wanted", {})} for case in each], np.arange(NUM_ROWS)),
        repeated_to_the_end([[3, 4, 5]], np.int32),
    )
    tokens, accepted = np.asarray(tokens), np.asarray(accepted)
    drafts = np.asarray([case["draft"] for case in each])
    assert (accepted <= 1).all() and (tokens[accepted > 0, 0] == drafts[accepted > 0]).all()
    after = tokens[np.arange(NUM_ROWS), accepted]
    return [(accepted[row :: len(cases)], after[row :: len(cases)]) for row in range(len(cases))]


# Probabilities of the target, the draft, and whether it stands: the threshold is the lesser of EPSILON and
# DELTA exp(-entropy).
TYPICAL = [
    ([1 / 8] * 8, 3, {}, 1),  # exp(-H) is 1 / 8: a threshold of 0.0375
    ([0.5, 0.5, 0, 0], 1, {}, 1),  # 0.3 / 2 is above EPSILON, 0.09
    ([0.92, 0.08, 0, 0], 1, {}, 0),  # below EPSILON, with exp(-H) = 0.757
    ([0.9, 0.1, 0, 0], 1, {}, 1),  # above it
    ([0.96, 0.04, 0, 0], 1, {}, 0),
    ([0.96, 0.04, 0, 0], 1, {"temperature": 2.0}, 1),  # the temperature makes it 0.17
    ([0.75, 0.13, 0.12, 0], 2, {}, 1),
    ([0.75, 0.13, 0.12, 0], 2, {"top_k": 2}, 0),  # filtered
    ([0.75, 0.13, 0.12, 0], 3, {}, 0),
    ([0.4] + [0.06] * 10, 1, {}, 1),  # exp(-H) is 0.128: a threshold of 0.0384
    ([0.5] + [0.03] * 5 + [0.07] * 5, 1, {}, 0),  # exp(-H) is 0.167: a threshold of 0.0493
    ([0.5] + [0.03] * 5 + [0.07] * 5, 6, {}, 1),
    ([0.97] + [0.003] * 10, 1, {}, 0),
]


def test_typical_acceptance_asks_more_of_a_draft_the_surer_the_target_is():
    assert (EPSILON, DELTA) == (0.09, 0.3)
    cases = [{"p": p, "draft": draft, "drawn": [0, 2], "wanted": wanted} for p, draft, wanted, _ in TYPICAL]
    for (accepted, after), row in zip(first_draft(RULES["typical"], cases), TYPICAL, strict=True):
        assert (accepted == row[-1]).all() and (after == (2 if row[-1] else 0)).all(), row


def test_a_draft_that_the_target_draws_is_typical_however_rare():
    same, other = ({"p": [0.97, 0.03], "draft": 1, "drawn": drawn} for drawn in ([1, 0], [0, 1]))
    (accepted, after), (refused, instead) = first_draft(RULES["typical"], [same, other])
    assert (accepted == 1).all() and (after == 0).all() and (refused == 0).all() and (instead == 0).all()


def test_impossible_drafts_are_rejected_and_doubtless_ones_accepted():
    p = [0.2, 0.3, 0.5, 0.0]
    impossible = [
        {"p": p, "draft": 3, "drawn": [0, 1], "q": [0.1, 0.1, 0.1, 0.7]},
        {"p": p, "draft": 3, "drawn": [0, 1], "q": [0.0, 0.0, 0.0, 1.0]},
    ]
    doubtless = [
        {"p": p, "draft": 1, "drawn": [0, 2], "q": p},  # the drafter is the target
        {"p": p, "draft": 2, "drawn": [0, 2], "q": [0.6, 0.2, 0.2, 0.0]},  # it was surer of another token
    ]
    # The drafter gave too much to token 0 and too little to token 2 alone.
    too_likely = {"p": [0.001, 0.499, 0.5], "draft": 0, "drawn": [0, 1], "q": [0.5, 0.499, 0.001]}
    # Nothing can be drawn: token 0, as `draw` has it.
    nothing = {"p": [0.0], "draft": 1, "drawn": [0, 0], "q": [0.5, 0.5]}
    no_number = {"p": [np.nan] * VOCAB, "draft": 1, "drawn": [10, 10], "q": [0.5, 0.5]}
    got = first_draft(RULES["rejection"], [*impossible, *doubtless, too_likely, nothing, no_number])
    for accepted, after in got[:2]:
        assert (accepted == 0).all() and set(after.tolist()) == {0, 1, 2}
    for accepted, after in got[2:4]:
        assert (accepted == 1).all() and (after == 2).all()
    accepted, after = got[4]
    assert accepted.mean() < 0.02 and (after[accepted == 0] == 2).all()
    for (accepted, after), token in zip(got[5:], (0, 10), strict=True):
        assert (accepted == 0).all() and (after == token).all()


def test_a_draft_that_its_drafter_could_not_draw_counts_as_certain():
    case = {"p": [0.25, 0.75, 0.0], "draft": 0, "drawn": [1, 1]}
    (told,) = first_draft(RULES["rejection"], [{**case, "q": [0.0, 0.5, 0.5]}])
    (certain,) = first_draft(RULES["rejection"], [case])
    for pair in zip(told, certain, strict=True):
        np.testing.assert_array_equal(*pair)
    accepted, after = certain
    assert abs(accepted.mean() - 0.25) < 0.02 and (after == 1).all()


@pytest.mark.parametrize(
    ("name", "scored"), [("exact", False), ("typical", False), ("rejection", True), ("rejection", False)]
)
def test_what_stands_is_drafts_and_then_a_token_that_the_target_could_draw(name, scored):
    rng = np.random.default_rng(1)
    each = [({"temperature": 0.0, "top_k": 2}, ALL_FILTERS, *SETTINGS)[i % 6] for i in range(NUM_ROWS)]
    state = sampling_rows(each, rng.integers(0, 2**32, NUM_ROWS))
    lens = rng.integers(0, J + 1, NUM_ROWS).astype(np.int32)
    drafts = rng.integers(0, VOCAB, (NUM_ROWS, J)).astype(np.int32)
    # What is no draft may be anything.
    drafts = np.where(np.arange(J) < lens[:, None], drafts, rng.choice([-1, VOCAB, 2**30], drafts.shape))
    ruled = rng.normal(size=(NUM_ROWS, J + 1, VOCAB)).astype(np.float32)
    ruled[:, :, 4] = -np.inf
    scores = jnp.asarray(rng.normal(size=(NUM_ROWS, J, VOCAB)), jnp.float32) if scored else ()
    positions = jnp.asarray(rng.integers(1, 99, (NUM_ROWS, 1)) + np.arange(J + 1), jnp.int32)
    drawn = drawn_at(jnp.asarray(ruled), state, positions)
    flat = jnp.asarray(ruled.reshape(-1, VOCAB))
    given = jnp.asarray(drafts, jnp.int32), jnp.asarray(lens), drawn, flat, scores, state, positions
    tokens, accepted = (np.asarray(x) for x in RULES[name](*given))
    same, agreed = (np.asarray(x) for x in exact(*given))
    place = np.arange(J + 1)
    assert (accepted <= lens).all() and (accepted == 2).any()
    assert (tokens[:, :J] == drafts)[place[:J] < accepted[:, None]].all()
    plain = (np.asarray(state.temperature) == 0) | (lens == 0)
    assert (accepted == agreed)[plain].all()
    assert (tokens == same)[plain[:, None] & (place <= accepted[:, None])].all()
    for row in np.flatnonzero(~plain)[:1000]:
        assert filtered_softmax(ruled[row, accepted[row]], **each[row])[tokens[row, accepted[row]]] > 0
    if name == "typical":
        assert (accepted >= agreed).all() and (accepted > agreed).any()


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
def test_a_step_without_drafts_is_the_draw_of_the_target(name):
    drawn, none = jnp.asarray([[3], [4]], jnp.int32), jnp.zeros((2, 0), jnp.int32)
    ruled, scores = jnp.zeros((2, VOCAB), jnp.float32), jnp.zeros((2, 0, VOCAB), jnp.float32)
    state = sampling_rows([{"temperature": 1.0}] * 2, [1, 2])
    tokens, accepted = RULES[name](none, jnp.zeros(2, jnp.int32), drawn, ruled, scores, state, jnp.ones_like(drawn))
    assert np.asarray(tokens).tolist() == [[3], [4]] and np.asarray(accepted).tolist() == [0, 0]
