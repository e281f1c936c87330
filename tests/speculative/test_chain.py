# SPDX-License-Identifier: Apache-2.0
"""Chains of drafts against heads computed over whole sequences, however the sequences came to be in the pool."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import stack_states
from metrale_jax.generate import first_state
from metrale_jax.models.proposer import Wish
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.speculative.chain import confident
from metrale_jax.speculative.eagle3 import Eagle3
from metrale_jax.speculative.mtp import Mtp
from tests.speculative.head_problems import Dense, Target, drafter_after, head_of, random_params

BLOCK, WIDTH, ROWS, DRAFTS, CHUNK = 8, 4, 3, 3, 16
HOT, SEED = 0.8, 5


class Scene:
    """Two sequences and a padding row in one pool: row 0 greedy, in slot 1; row 1 sampled, in slot 2."""

    def __init__(self, golden, kind, fill):
        capture = (0, 2, 3) if kind == "eagle3" else ()
        self.head = head_of(kind, golden.config, 50 if capture else 0, capture)
        self.weights = random_params(self.head)
        self.proposer = {"mtp": Mtp, "eagle3": Eagle3}[kind](self.head)
        self.steps, self.params = golden.drafted_by(self.proposer, self.weights, BLOCK, DRAFTS)
        self.dense = Dense(self.head, self.weights, Target(golden, capture))
        model = self.steps.model
        self.pool = self.steps.make_pool((1 + ROWS * WIDTH,) * len(model.layout.groups), fill, num_slots=4)
        self.pool = self.steps.run(
            "begin_slots",
            self.pool,
            np.asarray([1, 2, 3], np.int32),
            np.zeros((3, 1), np.int32),
            np.ones(3, bool),
        )
        rows = [self.row(place, temperature) for place, temperature in enumerate((0.0, HOT, 0.0))]
        self.state = stack_states([*rows[:2], jax.tree.map(np.zeros_like, rows[2])])
        self.known = [[], []]
        self.propose = jax.jit(partial(self.proposer.propose, model, wish=Wish(DRAFTS, True)))

    def row(self, place, temperature):
        """A sequence of its own blocks and slot that has run nothing."""
        layout, vocab = self.steps.model.layout, self.steps.model.config.vocab_size
        state = first_state(layout, 20, WIDTH, SamplingParams(temperature=temperature), SEED, (), vocab)
        tables = tuple(table + place * WIDTH for table in state.block_tables)
        return state.replace(block_tables=tables, recurrent_slot=np.asarray([place + 1], np.int32))

    def flat(self, chunks):
        """Flat tokens and lengths."""
        tokens = np.zeros(CHUNK, np.int32)
        joined = [int(token) for chunk in chunks for token in chunk]
        tokens[: len(joined)] = joined
        return tokens, np.asarray([*map(len, chunks), 0], np.int32)

    def prefill(self, *chunks):
        """Runs the next chunk of each sequence."""
        self.pool, state, _ = self.steps.run("prefill", self.params, self.pool, self.state, *self.flat(chunks))
        self.state = jax.tree.map(np.asarray, state)
        for known, chunk in zip(self.known, chunks, strict=True):
            known += [int(token) for token in chunk]

    def mixed(self, decoding, filling, chunk):
        """Runs the last token of one sequence and a chunk of the other."""

        def alone(row):
            pick = np.where(np.arange(ROWS) == row, row, ROWS - 1)
            return jax.tree.map(lambda leaf: leaf[pick], self.state)

        chunks = [chunk if row == filling else [] for row in range(2)]
        given = self.params, self.pool, alone(decoding), alone(filling), *self.flat(chunks)
        self.known[decoding].append(int(self.state.last_token[decoding]))
        self.known[filling] += [int(token) for token in chunk]
        self.pool, one, other, *_ = self.steps.run("mixed", *given)
        row = np.arange(ROWS)
        self.state = jax.tree.map(
            lambda left, right: np.where((row == decoding).reshape(-1, *[1] * (left.ndim - 1)), left, right), one, other
        )

    def take_over(self, row, lender, length):
        """Another sequence takes the row and its slot, and the lender's first blocks."""
        tables = tuple(table.copy() for table in self.state.block_tables)
        for table in tables:
            table[row, : length // BLOCK] = table[lender, : length // BLOCK]
        seq_len = np.where(np.arange(ROWS) == row, length, self.state.seq_len).astype(np.int32)
        self.state = self.state.replace(block_tables=tables, seq_len=seq_len)
        self.known[row] = self.known[lender][:length]

    def verify(self, drafts, lens):
        """Verifies drafts, the first `lens` of each row; gives how many were accepted."""
        given = np.asarray([*drafts, [0] * DRAFTS], np.int32), np.asarray([*lens, 0], np.int32)
        last = self.state.last_token
        self.pool, state, out = self.steps.run("verify", self.params, self.pool, self.state, *given)
        self.state, counts = jax.tree.map(np.asarray, state), np.asarray(out.num_tokens)
        for row, known in enumerate(self.known):
            known += [int(last[row]), *(int(token) for token in np.asarray(out.tokens)[row, : counts[row] - 1])]
        return (counts - 1).tolist()[:2]

    def proposed(self, limits):
        """The drafts of all rows."""
        drafts, _ = self.propose(self.params, self.pool, self.state, jnp.asarray([*limits, 0], jnp.int32))
        return jax.tree.map(np.asarray, drafts)

    def assert_drafts(self, limits=(3, 3), unknown=((), ())):
        """Asserts that drafts and their scores are those of whole sequences with the target's features."""
        drafts = self.proposed(limits)
        assert drafts.lens.tolist() == [*limits, 0]
        for row, known in enumerate(self.known):
            assert len(known) == self.state.seq_len[row]
            tokens = [*known, self.state.last_token[row]]
            expected, scores = self.dense.drafts(tokens, limits[row], (0.0, HOT)[row], SEED, unknown[row])
            assert drafts.tokens[row, : limits[row]].tolist() == expected
            ids = self.weights.token_ids
            ids = np.arange(scores.shape[1]) if isinstance(ids, tuple) else np.asarray(ids)
            got = drafts.scores[row, : limits[row]]
            np.testing.assert_allclose(got[:, ids], scores, rtol=1e-3, atol=1e-3)
            assert np.isneginf(got).sum() == got.size - scores.size


@pytest.mark.parametrize("kind, name", [("mtp", "granite"), ("eagle3", "llama-default")])
def test_drafts_are_those_of_whole_sequences_with_the_targets_features(golden, nan_pool, kind, name):
    scene = Scene(golden(name, BLOCK), kind, nan_pool)
    prompt = [int(token) for token in golden(name, BLOCK).prompt]
    first, second = prompt[:13], prompt[20:29]
    scene.prefill(first[:5], second[:7])
    scene.prefill(first[5:], [])
    scene.assert_drafts()
    scene.mixed(0, 1, second[7:])
    scene.assert_drafts((3, 2))
    right = scene.dense.target.likeliest([*scene.known[0], scene.state.last_token[0]], 2)
    wrong = [scene.weights.fc.weight.shape[0] - 1] * 3
    assert scene.verify([[*right, wrong[0]], wrong], (3, 2)) == [2, 0]
    scene.assert_drafts()
    # All three drafts accepted: the bonus token's feature is the row's last.
    right = scene.dense.target.likeliest([*scene.known[0], scene.state.last_token[0]], 3)
    assert scene.verify([right, wrong], (3, 0)) == [3, 0]
    scene.assert_drafts()
    assert scene.proposed((2, 0)).lens.tolist() == [2, 0, 0]
    # Another sequence begins in slot 2 after a block that it shares: nobody knows the feature before its first token.
    scene.take_over(1, 0, BLOCK)
    scene.prefill([], prompt[40:44])
    scene.assert_drafts(unknown=((), (BLOCK - 1,)))


def test_a_chain_ends_where_the_head_is_not_sure(golden, nan_pool):
    model = golden("llama-default", BLOCK)
    head = head_of("mtp", model.config)
    weights = random_params(head)
    tokens = model.prompt[:11]
    _, scores = Dense(head, weights, Target(model, ())).drafts(tokens, DRAFTS)
    chances = np.exp(scores.max(axis=1)) / np.exp(scores).sum(axis=1)
    least = int(chances.argmin())
    assert least, "the first draft is not the one to end before"
    proposer = Mtp(head, float(chances[least] * 1.01))
    steps, params = model.drafted_by(proposer, weights, BLOCK, DRAFTS)
    assert drafter_after(steps, params, DRAFTS, nan_pool)(tokens).lens == least


def test_confidence_is_that_of_the_likeliest_token_at_the_temperature_drawn_with():
    scores = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]] * 3))
    rows = [SamplingRow(SamplingParams(temperature=heat), 0, (), 1) for heat in (0.0, 1.0, 0.5)]
    sampling = jax.tree.map(jnp.asarray, sampling_state(rows, 3, 1, 0))
    sharp = 0.25 / (0.25 + 0.09 + 0.04)
    for least, expected in ((0.49, [True, True, True]), (0.51, [False, False, True]), (sharp * 1.01, [False] * 3)):
        assert confident(scores, sampling, least).tolist() == expected


def test_rows_of_more_drafts_than_are_kept_of_are_refused(golden, nan_pool):
    scene = Scene(golden("llama-default", BLOCK), "mtp", nan_pool)
    with pytest.raises(ConfigError, match="rows of 6 tokens are more than the 4 .* num_drafts=5"):
        scene.steps.run(
            "verify", scene.params, scene.pool, scene.state, np.zeros((ROWS, 5), np.int32), np.zeros(ROWS, np.int32)
        )
