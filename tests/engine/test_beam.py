# SPDX-License-Identifier: Apache-2.0
"""Beam search finds what transformers finds, hypothesis for hypothesis, and keeps its own promises at the edges."""

import json
from pathlib import Path

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.beam import BeamSearch
from metrale_jax.generate import first_state
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import make_pool

BEAMS = Path(__file__).parent.parent / "goldens" / "beams"
MODELS = ("llama-default", "gemma2", "qwen3", "granite")
EARLY_STOPPING = {"true": True, "false": False, "never": "never"}
TABLE_VOCABULARY = 12
MODEL_TOKENS = 48


def read_groups(source):
    return json.loads((BEAMS / f"{source}.json").read_text())


def new_search(width=2, num_return=None, max_tokens=8, stop_ids=(0,), length_penalty=1.0, early_stopping=False):
    return BeamSearch(width, num_return or width, max_tokens, frozenset(stop_ids), length_penalty, early_stopping)


def log_softmax(logits):
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


def run(beams, logprobs_after, stop_ids=(), min_tokens=0):
    """The search, done. `logprobs_after(rows)` gives float32 `[rows, V]` after each row's generated tokens.

    The rows are advanced as an engine would: by the parents and tokens that it was told, checked against `live`.
    """
    rows = [()]
    while not beams.done:
        assert rows == [beam.tokens for beam in beams.live]
        logprobs = logprobs_after(rows).copy()
        if len(rows[0]) < min_tokens:
            logprobs[:, list(stop_ids)] = -np.inf
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, : beams.candidates_per_row]
        step = beams.advance(ids, np.take_along_axis(logprobs, ids, 1))
        rows = [(*rows[parent], token) for parent, token in zip(step.parents, step.tokens, strict=True)]
        assert step.done == beams.done == (not rows)
    return beams


def assert_group_agrees(group, logprobs_after):
    stop_ids = group["stop_ids"]
    for name, wanted in group["found"].items():
        beams = new_search(
            group["width"],
            group["num_return"],
            group["max_tokens"],
            stop_ids,
            group["length_penalty"],
            EARLY_STOPPING[name],
        )
        found = run(beams, logprobs_after, stop_ids, group["min_tokens"]).hypotheses
        settings = {key: value for key, value in group.items() if key != "found"} | {"early_stopping": name}
        assert [list(item.tokens) for item in found] == [tokens for tokens, _ in wanted], settings
        for item, (tokens, score) in zip(found, wanted, strict=True):
            assert abs(item.score - score) < 1e-4 * max(1.0, abs(score)), settings
            assert item.score == pytest.approx(item.logprob / len(tokens) ** group["length_penalty"], rel=1e-6)


def test_searches_over_random_tables_find_what_transformers_finds():
    for group in read_groups("tables"):
        rng = np.random.default_rng(group["seed"])
        shape = (2, TABLE_VOCABULARY, TABLE_VOCABULARY)
        last, before = (2 * rng.standard_normal(shape)).astype(np.float32)

        def logprobs_after(rows, group=group, last=last, before=before):
            ends = np.asarray([[*group["prompt"], *row][-2:] for row in rows])
            return log_softmax(last[ends[:, 1]] + before[ends[:, 0]])

        assert_group_agrees(group, logprobs_after)


def scorer(model):
    """`logprobs(tokens)`: float32 `[V]` after a sequence of up to `MODEL_TOKENS`, one program for all, remembered."""
    layout = model.layout
    width = MODEL_TOKENS // layout.block_size
    known = {}

    def logprobs(tokens):
        if tokens not in known:
            chunk = np.zeros(MODEL_TOKENS, np.int32)
            chunk[: len(tokens)] = tokens
            pool = make_pool(layout, (width + 1,) * len(layout.groups))
            greedy = SamplingParams(temperature=0)
            state = first_state(layout, len(tokens), width, greedy, 0, (), model.config.vocab_size)
            lengths = np.asarray([len(tokens)], np.int32)
            _, _, logits = model.steps.run("score", model.params, pool, state, chunk, lengths)
            # Each earlier row is the answer to a shorter sequence.
            for size, row in enumerate(log_softmax(np.asarray(logits[: len(tokens)])), start=1):
                known.setdefault(tokens[:size], row)
        return known[tokens]

    return logprobs


@pytest.mark.parametrize("name", MODELS)
def test_searches_with_our_models_find_what_transformers_finds(name, golden):
    model = golden(name)
    logprobs = scorer(model)
    for group in read_groups(name):
        prompt = tuple(model.prompt[: group["prompt_len"]].tolist())
        assert_group_agrees(group, lambda rows, prompt=prompt: np.stack([logprobs((*prompt, *row)) for row in rows]))


@pytest.mark.parametrize("source", [*MODELS, "tables"])
def test_goldens_hold_every_kind_of_ending(source):
    groups = read_groups(source)
    stopped, cut = set(), set()
    for group in groups:
        for tokens, _ in [item for found in group["found"].values() for item in found]:
            (stopped if tokens[-1] in group["stop_ids"] else cut).add(len(tokens))
    assert len(stopped) >= 5 and len(cut) >= 3
    for first, second in (("true", "false"), ("false", "never")):
        assert any(group["found"][first] != group["found"][second] for group in groups), (first, second)


def chain(*steps):
    """`logprobs_after` where step i has the same log-probabilities, given as probabilities, after every row."""

    def logprobs_after(rows):
        probabilities = np.asarray(steps[len(rows[0])], np.float32)
        with np.errstate(divide="ignore"):
            return np.log(np.broadcast_to(probabilities, (len(rows), len(probabilities))))

    return logprobs_after


def test_one_step_orders_beams_by_sum_and_names_their_parents():
    beams = new_search(width=2, stop_ids=(9,))
    step = beams.advance([[4, 5, 9]], [[-1.0, -2.0, -5.0]])
    assert (step.parents, step.tokens, step.done) == ((0, 0), (4, 5), False)
    step = beams.advance([[6, 7, 9], [8, 6, 9]], [[-3.0, -3.5, -9.0], [-0.5, -2.25, -9.0]])
    assert (step.parents, step.tokens) == ((1, 0), (8, 6))
    assert [(beam.tokens, beam.logprob) for beam in beams.live] == [((5, 8), -2.5), ((4, 6), -4.0)]


def test_the_order_within_a_row_is_of_no_account():
    for ids, logprobs in ([[4, 5, 9]], [[-1.0, -2.0, -5.0]]), ([[9, 5, 4]], [[-5.0, -2.0, -1.0]]):
        assert new_search(stop_ids=(9,)).advance(ids, logprobs).tokens == (4, 5)


def test_equal_sums_go_by_beam_and_then_by_token_id():
    beams = new_search(width=3, stop_ids=(9,))
    assert beams.advance([[7, 3, 5, 4]], [[-1.0] * 4]).tokens == (3, 4, 5)
    step = beams.advance([[8, 2, 6, 1]] * 3, [[-3.0] * 4, [-2.0] * 4, [-2.0] * 4])
    assert (step.parents, step.tokens) == ((1, 1, 1), (1, 2, 6))


def test_of_equal_scores_the_hypothesis_that_finished_first_leads():
    beams = new_search(width=2, stop_ids=(0,), length_penalty=1.0, early_stopping="never")
    beams.advance([[0, 1, 2]], [[-1.0, -1.5, -3.0]])
    beams.advance([[0, 1, 2], [0, 1, 2]], [[-0.5, -4.0, -5.0], [-9.0, -9.0, -9.0]])
    assert [item.tokens for item in beams.hypotheses] == [(0,), (1, 0)]
    assert [item.score for item in beams.hypotheses] == [-1.0, -1.0]


def test_a_stop_token_outside_the_best_candidates_finishes_nothing():
    beams = new_search(width=2, stop_ids=(0,))
    step = beams.advance([[1, 2, 0]], [[-1.0, -2.0, -2.5]])
    assert not beams.hypotheses and step.tokens == (1, 2)


def test_with_early_stopping_the_search_ends_once_width_hypotheses_are_finished():
    # A second token of 0.9 would beat what finishes at the first.
    beams = new_search(width=2, stop_ids=(0, 1), length_penalty=1.0, early_stopping=True)
    step = beams.advance([[0, 1, 2, 3]], np.log([[0.3, 0.3, 0.2, 0.2]]))
    assert step.done and (step.parents, step.tokens) == ((), ())
    assert [item.tokens for item in beams.hypotheses] == [(0,), (1,)]


def test_without_early_stopping_the_search_ends_once_the_best_beam_is_behind_at_its_present_length():
    beams = new_search(width=2, stop_ids=(0, 1), length_penalty=1.0, early_stopping=False)
    assert beams.advance([[0, 1, 2, 3]], np.log([[0.3, 0.3, 0.2, 0.2]])).done
    beams = new_search(width=1, num_return=1, stop_ids=(0,), early_stopping=False)
    assert beams.advance([[2, 0]], np.log([[0.6, 0.4]])).tokens == (2,)


def test_never_stopping_early_goes_on_while_the_longest_answer_could_still_win():
    beams = new_search(width=2, stop_ids=(0, 1), length_penalty=1.0, early_stopping="never")
    assert not beams.advance([[0, 1, 2, 3]], np.log([[0.3, 0.3, 0.2, 0.2]])).done
    assert not beams.advance([[0, 1, 4, 5], [0, 1, 4, 5]], np.log([[0.9, 0.05, 0.04, 0.01]] * 2)).done
    # Two tokens at 0.2 * 0.9 score -0.86 on average, the single one at 0.3 scores -1.2.
    assert [item.tokens for item in beams.hypotheses] == [(2, 0), (3, 0)]


def test_never_with_a_penalty_on_length_reckons_with_the_present_length():
    beams = new_search(width=2, stop_ids=(0,), length_penalty=-1.0, early_stopping="never", max_tokens=8)
    beams.advance([[1, 0, 2]], [[-0.5, -2.0, -3.0]])
    step = beams.advance([[3, 0, 4], [3, 0, 4]], [[-0.125, -0.75, -4.0], [-5.0, -5.0, -5.0]])
    assert [item.score for item in beams.hypotheses] == [-2.0, -2.5]
    # The best beam scores -1.25 at two tokens and -5 at eight.
    assert not step.done


def test_a_beam_that_only_equals_the_worst_hypothesis_is_not_worth_a_step():
    beams = new_search(width=2, stop_ids=(0, 1), early_stopping=False)
    assert beams.advance([[0, 1, 2, 3]], [[-1.0] * 4]).done


def test_all_beams_may_stop_in_one_step_and_others_take_their_place():
    beams = new_search(width=2, stop_ids=(0,), early_stopping="never", max_tokens=20)
    beams.advance([[1, 2, 0]], np.log([[0.5, 0.4, 0.1]]))
    step = beams.advance([[0, 3, 4]] * 2, np.log([[0.9, 0.06, 0.04]] * 2))
    assert [item.tokens for item in beams.hypotheses] == [(1, 0), (2, 0)]
    assert (step.parents, step.tokens) == ((0, 1), (3, 3))


def test_at_max_tokens_unfinished_beams_are_scored_like_finished_ones():
    beams = new_search(width=2, max_tokens=2, stop_ids=(0,), length_penalty=2.0)
    beams.advance([[1, 2, 0]], [[-1.0, -2.0, -8.0]])
    assert beams.advance([[3, 4, 0]] * 2, [[-1.0, -2.5, -9.0]] * 2).done
    assert [(item.tokens, item.score, item.logprob) for item in beams.hypotheses] == [
        ((1, 3), -0.5, -2.0),
        ((2, 3), -0.75, -3.0),
    ]


def test_fewer_are_returned_than_are_searched():
    beams = new_search(width=3, num_return=1, max_tokens=1)
    assert beams.advance([[3, 4, 5, 0]], [[-1.0, -2.0, -3.0, -4.0]]).done
    assert [item.tokens for item in beams.hypotheses] == [(3,)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_width_one_is_greedy(early_stopping):
    steps = chain([0.1, 0.2, 0.7], [0.3, 0.4, 0.3], [0.5, 0.1, 0.4], [0.1, 0.8, 0.1])
    beams = new_search(width=1, stop_ids=(0,), length_penalty=2.0, early_stopping=early_stopping)
    (best,) = run(beams, steps).hypotheses
    assert best.tokens == (2, 1, 0)
    assert best.logprob == pytest.approx(np.log(0.7 * 0.4 * 0.5))


def test_a_vocabulary_smaller_than_the_width_gives_every_sequence_once():
    beams = new_search(width=8, max_tokens=3, stop_ids=(0,), length_penalty=0.0, early_stopping="never")
    found = run(beams, chain([0.2, 0.8], [0.3, 0.7], [0.4, 0.6])).hypotheses
    assert [item.tokens for item in found] == [(1, 1, 1), (1, 0), (1, 1, 0), (0,)]
    assert [item.score for item in found] == pytest.approx(np.log([0.336, 0.24, 0.224, 0.2]))


def test_forbidden_tokens_are_never_taken():
    beams = new_search(width=3, max_tokens=2, stop_ids=(0,))
    found = run(beams, chain([0.0, 1.0, 0.0], [0.0, 0.5, 0.5])).hypotheses
    assert [item.tokens for item in found] == [(1, 1), (1, 2)]


def test_a_search_without_stop_ids_runs_to_max_tokens():
    beams = new_search(width=2, max_tokens=3, stop_ids=())
    found = run(beams, chain(*[[0.5, 0.3, 0.2]] * 3)).hypotheses
    assert beams.candidates_per_row == 2
    assert [item.tokens for item in found] == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_more_candidates_than_asked_for_change_nothing(early_stopping):
    rng = np.random.default_rng(3)
    for _ in range(30):
        width, stop_ids = int(rng.integers(1, 6)), tuple(rng.choice(20, int(rng.integers(0, 4)), replace=False))
        table = log_softmax((2 * rng.standard_normal((21, 20))).astype(np.float32))
        found = []
        for extra in (0, 20):
            beams = new_search(width, max_tokens=10, stop_ids=stop_ids, early_stopping=early_stopping)
            k, rows = beams.candidates_per_row + extra, [20]
            while not beams.done:
                ids = np.argsort(-table[rows], axis=1)[:, :k]
                rows = list(beams.advance(ids, np.take_along_axis(table[rows], ids, 1)).tokens)
            found.append(beams.hypotheses)
        assert found[0] == found[1] and len(found[0]) == width


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 0, "num_return": 1}, "beam width 0"),
        ({"num_return": 3}, "n=3"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"early_stopping": "always"}, "early_stopping='always'"),
        ({"early_stopping": 1}, "early_stopping=1"),
        ({"length_penalty": 99.0}, "length_penalty=99.0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, said):
    with pytest.raises(RequestError, match=said):
        new_search(**settings)
