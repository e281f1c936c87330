# SPDX-License-Identifier: Apache-2.0
"""Steps that draft, where the test says which drafts stand: what was drafted can be held against an oracle's guesses
after any text, however it came about."""

import jax
import numpy as np

from metrale_jax.core.sequence import SequenceState
from metrale_jax.generate import first_state
from metrale_jax.models.decoder import make_model
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, sampling_state
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major
from metrale_jax.steps.serving import DecodeRows
from tests.conftest import FORMATS

WIDTH = 12
SEED = 7
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
# Of two rows' drafts, how many stand and how many there is room for; `()` is a step that runs the last tokens alone.
STANDS = [(3, 0), (0, 0), (1, 3), (0, 1), (2, 2)]
LIMITS = [(3, 3), (), (2, 3), (3, 0), (3, 3)]


class Alone:
    """A model by itself, which runs the whole of a text for each token of its continuation."""

    def __init__(self, config, params, longest=48):
        self.steps = Steps(make_model(config, "cpu", 8, FORMATS), row_major(jax.devices()[0]))
        self.params, self.longest = params, longest

    def continuation(self, text, count, sampling, fill):
        """The next `count` tokens."""
        layout, text = self.steps.model.layout, list(text)
        start, width = len(text), self.longest // 8
        for _ in range(count):
            pool = self.steps.make_pool((width + 1,) * len(layout.groups), fill)
            state = first_state(layout, start, width, sampling, SEED, (), self.steps.model.config.vocab_size)
            flat = np.zeros(self.longest, np.int32)
            flat[: len(text)] = text
            _, _, out = self.steps.run("prefill", self.params, pool, state, flat, np.asarray([len(text)], np.int32))
            text.append(int(out.tokens[0, 0]))
        return text[start:]


def drafted_runs(steps, params, prompts, stands, limits, num_drafts, fill, sampling=GREEDY, chunk=5):
    """Yields `texts, drafts`, a list each of the two rows' tokens and of the drafts made after them, step by step.

    After prompts that are taken in by chunks of `chunk` tokens, row r has up to `limits[step][r]` drafts in each step,
    of which `stands[step][r]` stand; the token after those is one that nobody guessed. A third row is padding.
    Nothing is yielded where `limits[step]` is `()` and nothing is drafted.
    """
    config, layout = steps.model.config, steps.model.layout
    texts = [list(prompt) for prompt in prompts]
    row = SamplingRow(sampling, SEED, (), 1)
    table = np.zeros((3, WIDTH), np.int32)
    table[:2] = np.arange(1, 2 * WIDTH + 1).reshape(2, WIDTH)
    state = SequenceState(
        seq_len=np.zeros(3, np.int32),
        prompt_len=np.asarray([*map(len, texts), 0], np.int32),
        last_token=np.zeros(3, np.int32),
        block_tables=(table,) * len(layout.groups),
        recurrent_slot=np.asarray([1, 2, 0], np.int32),
        adapter_slot=np.zeros(3, np.int32),
        sampling=sampling_state([row, row, None], config.vocab_size, 1),
    )
    pool = steps.make_pool((2 * WIDTH + 1,) * len(layout.groups), fill, 3)
    if layout.carried:
        zeros = np.zeros((2, config.max_context_tokens), np.int32)
        pool = steps.run("begin_slots", pool, np.asarray([1, 2], np.int32), zeros, np.ones(2, bool))
    for start in range(0, max(map(len, texts)), chunk):
        parts = [text[start : start + chunk] for text in texts]
        flat = np.zeros(2 * chunk, np.int32)
        flat[: sum(map(len, parts))] = [*parts[0], *parts[1]]
        lengths = np.asarray([*map(len, parts), 0], np.int32)
        pool, state, _ = steps.run("prefill", params, pool, state, flat, lengths)
    for text in texts:
        text.append((text[-1] + 3) % config.vocab_size)
    for stand, room in zip(stands, limits, strict=True):
        last = np.asarray([0, texts[0][-1], texts[1][-1]], np.int32)
        state = state.replace(
            seq_len=np.asarray([len(texts[0]) - 1, len(texts[1]) - 1, 0], np.int32),
            last_token=np.asarray([*last[1:], 0], np.int32),
        )
        decoding = DecodeRows(state, np.asarray([1, 2, 0], np.int32))
        if room:
            room = np.asarray([*room, 0], np.int32)
            pool, _, drafts = steps.run("advance_drafts", params, pool, last, decoding, room, num_drafts=num_drafts)
            tokens, lens = np.asarray(drafts.tokens), np.asarray(drafts.lens)
            assert lens.tolist() == room.tolist()
            made = [tokens[r, : lens[r]].tolist() for r in range(2)]
            yield [list(text) for text in texts], made
        else:
            pool, _, _ = steps.run("advance", params, pool, last, decoding, ())
            made = [[], []]
        for text, guesses, count in zip(texts, made, stand, strict=True):
            following = guesses[count] if count < len(guesses) else text[-1]
            text += [*guesses[:count], (following + 1) % config.vocab_size]


def assert_drafts_are_its_own(target, proposer, weights, prompts, num_drafts, fill):
    """Asserts that a draft model, in steps of which some drafts stand, says what it says by itself."""
    steps, params = target.drafted_by(proposer, weights, 8)
    alone = Alone(proposer.config, weights)
    for texts, drafts in drafted_runs(steps, params, prompts, STANDS, LIMITS, num_drafts, fill, SAMPLED):
        for text, made in zip(texts, drafts, strict=True):
            assert made == alone.continuation(text, len(made), SAMPLED, fill)
