# SPDX-License-Identifier: Apache-2.0
"""Models that keep recurrent state give what transformers gives, however their tokens are spread over steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.aot.inspect_module import PoolArrays, inspect_module
from metrale_jax.core.sequence import stack_states
from metrale_jax.generate import first_state
from metrale_jax.models.decoder import make_model
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.formats import StateFormats
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major
from tests.conftest import nan_fill
from tests.sometimes import mostly_slow

NAMES = ["qwen3-next", "olmo-hybrid", "kimi-linear", "mamba2", "nemotron-h-experts", "bamba", "falcon-h1-norm"]
# One of each kind of recurrent layer, the last with attention in the same layer.
ALWAYS = ["qwen3-next", "kimi-linear", "nemotron-h-experts", "falcon-h1-norm"]
ROWS, TOKENS, WIDTH, DRAFTS, SLOTS = 3, 160, 12, 3, 6
TOLERANCE = 1e-4


class Hybrid:
    """A golden model whose slots hold `DRAFTS` pending tokens, run at fixed shapes on a pool of NaN."""

    def __init__(self, golden):
        self.golden, self.config = golden, golden.config
        formats = StateFormats("float32", num_pending=DRAFTS)
        self.steps = Steps(make_model(golden.config, "cpu", 16, formats), row_major(jax.devices()[0]))
        self.layout = self.steps.model.layout
        self.prompt = golden.prompt
        self.logits = golden.data["logits_300"]

    def pool(self):
        return self.steps.make_pool((ROWS * WIDTH + 1,) * len(self.layout.groups), nan_fill, SLOTS)

    def sequence(self, place: int = 0, slot: int = 1):
        """A sequence that has run nothing, in blocks of its own and in a slot."""
        greedy = SamplingParams(temperature=0)
        state = first_state(self.layout, 300, WIDTH, greedy, 0, (), self.config.vocab_size)
        tables = tuple(table + place * WIDTH for table in state.block_tables)
        return state.replace(block_tables=tables, recurrent_slot=np.asarray([slot], np.int32))

    def batch(self, sequences):
        empty = jax.tree.map(np.zeros_like, sequences[0])
        return stack_states([*sequences, *[empty] * (ROWS - len(sequences))])

    def run(self, name, pool, sequences, *rest):
        """Pool, the sequences after a step, and what else it gives."""
        pool, state, out = self.steps.run(name, self.golden.params, pool, self.batch(sequences), *rest)
        each = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i : i + 1], state) for i in range(len(sequences))]
        return pool, each, out

    def score(self, pool, sequences, chunks):
        """Pool, the sequences after their chunks and the logits of each chunk."""
        flat = np.zeros(TOKENS, np.int32)
        flat[: sum(map(len, chunks))] = np.concatenate(chunks)
        lengths = np.asarray([*map(len, chunks), *[0] * (ROWS - len(chunks))], np.int32)
        pool, sequences, logits = self.run("score", pool, sequences, flat, lengths)
        ends = np.cumsum(lengths)
        return pool, sequences, [np.asarray(logits)[end - len(c) : end] for c, end in zip(chunks, ends, strict=False)]

    def assert_right(self, logits, begin: int):
        want = self.logits[begin : begin + len(logits)]
        np.testing.assert_allclose(logits, want, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=mostly_slow(NAMES, ALWAYS))
def hybrid(request, golden):
    return Hybrid(golden(request.param))


@pytest.mark.parametrize("cuts", [(1, 2, 130), (63, 64, 65, 130), (7, 70, 130), (64, 128, 130)])
def test_a_prompt_gives_the_same_logits_however_it_is_cut(hybrid, cuts):
    pool, sequence, begin = hybrid.pool(), hybrid.sequence(), 0
    for end in cuts:
        pool, (sequence,), (logits,) = hybrid.score(pool, [sequence], [hybrid.prompt[begin:end]])
        hybrid.assert_right(logits, begin)
        begin = end


def test_sequences_give_the_same_logits_wherever_they_are_in_a_step(hybrid):
    pool = hybrid.pool()
    sequences = [hybrid.sequence(place, slot) for place, slot in ((0, 4), (1, 2), (2, 5))]
    begins = [0, 0, 0]
    for lengths in ((7, 65, 1), (64, 3, 0), (2, 0, 90), (1, 64, 63)):
        chunks = [hybrid.prompt[b : b + n] for b, n in zip(begins, lengths, strict=True)]
        pool, sequences, found = hybrid.score(pool, sequences, chunks)
        for logits, begin in zip(found, begins, strict=True):
            hybrid.assert_right(logits, begin)
        begins = [b + n for b, n in zip(begins, lengths, strict=True)]


def test_a_state_goes_on_after_decode_steps(hybrid):
    pool, sequence, _ = hybrid.score(hybrid.pool(), [hybrid.sequence()], [hybrid.prompt[:60]])
    (sequence,) = sequence
    for at in range(60, 66):
        sequence = sequence.replace(last_token=hybrid.prompt[at : at + 1])
        pool, (sequence,), _ = hybrid.run("decode", pool, [sequence])
    _, _, (logits,) = hybrid.score(pool, [sequence], [hybrid.prompt[66:150]])
    hybrid.assert_right(logits, 66)


@pytest.mark.parametrize("pattern", [(0, 3, 1, 2), (3, 3), (2, None), (3, None, None, 1), (1, None, 0)])
def test_any_drafts_give_the_stream_of_transformers(hybrid, pattern):
    """`pattern` says how many drafts of each step are right; None is a step without drafts."""
    length = 65
    want = hybrid.golden.data[f"greedy_{length}"].tolist()
    vocab = hybrid.config.vocab_size
    pool, (sequence,), (logits,) = hybrid.score(hybrid.pool(), [hybrid.sequence()], [hybrid.prompt[:length]])
    got = [int(np.argmax(logits[-1]))]
    steps = 0
    while len(got) < len(want) - DRAFTS - 1:
        right = pattern[steps % len(pattern)]
        sequence = sequence.replace(last_token=np.asarray(got[-1:], np.int32))
        if right is None:
            pool, (sequence,), out = hybrid.run("decode", pool, [sequence])
        else:
            coming = want[len(got) : len(got) + DRAFTS]
            drafts = [token if i < right else (token + 5) % vocab for i, token in enumerate(coming)]
            rows = np.zeros((ROWS, DRAFTS), np.int32)
            rows[0] = drafts
            lens = np.asarray([DRAFTS, *[0] * (ROWS - 1)], np.int32)
            pool, (sequence,), out = hybrid.run("verify", pool, [sequence], rows, lens)
            assert int(out.num_tokens[0]) == right + 1
        got += np.asarray(out.tokens)[0, : int(out.num_tokens[0])].tolist()
        steps += 1
    assert got == want[: len(got)]
    # What was accepted last still waits: a chunk takes it in before its own tokens.
    follow, (_,), _ = hybrid.score(pool, [sequence], [np.asarray(got[-1:], np.int32)])
    assert all(np.isfinite(np.asarray(leaf)[:, 1]).all() for group in follow.slot_groups for leaf in [group.matrix])


def test_a_slot_handed_on_holds_nothing_of_the_stranger(hybrid):
    pool, _, _ = hybrid.score(hybrid.pool(), [hybrid.sequence(0, 3)], [hybrid.prompt[100:230]])
    _, _, (logits,) = hybrid.score(pool, [hybrid.sequence(1, 3)], [hybrid.prompt[:40]])
    hybrid.assert_right(logits, 0)


def test_padding_leaves_every_slot_alone(hybrid):
    pool, sequences, _ = hybrid.score(
        hybrid.pool(), [hybrid.sequence(0, 2), hybrid.sequence(1, 4)], [hybrid.prompt[:30], hybrid.prompt[:20]]
    )
    before = jax.tree.map(np.array, pool.slot_groups)
    pool, _, _ = hybrid.run("decode", pool, sequences[:1])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(pool.slot_groups), strict=True):
        others = [1, 3, 4, 5]
        assert np.asarray(new)[:, others].tobytes() == old[:, others].tobytes()
    assert int(pool.positions[4]) == 20


@pytest.mark.parametrize("lie", [1, -DRAFTS - 1])
def test_a_state_that_is_not_where_its_sequence_stands_gives_no_answer(hybrid, lie):
    pool, (sequence,), _ = hybrid.score(hybrid.pool(), [hybrid.sequence()], [hybrid.prompt[:30]])
    pool = pool.replace(positions=jnp.asarray(pool.positions).at[1].add(lie))
    pool, (sequence,), out = hybrid.run("decode", pool, [sequence])
    assert not bool(np.asarray(out.finite)[0].all())


def test_more_drafts_than_a_slot_holds_are_refused(hybrid):
    rows = np.zeros((ROWS, DRAFTS + 1), np.int32)
    with pytest.raises(ValueError, match="draft fewer"):
        hybrid.run("verify", hybrid.pool(), [hybrid.sequence()], rows, np.zeros(ROWS, np.int32))


@pytest.mark.parametrize("step", ["verify", "prefill"])
def test_a_step_copies_nothing_of_the_pool(golden, step):
    hybrid = Hybrid(golden("qwen3-next-dense"))
    steps, params = hybrid.steps, hybrid.golden.params
    pool = steps.abstract_pool((4097,) * len(hybrid.layout.groups), 4097)
    lengths = np.zeros(ROWS, np.int32)
    rest = {"verify": (np.zeros((ROWS, DRAFTS), np.int32), lengths), "prefill": (np.zeros(TOKENS, np.int32), lengths)}
    compiled = steps.executable(step, params, pool, hybrid.batch([hybrid.sequence()]), *rest[step])
    sizes = tuple(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    inspection = inspect_module(compiled.as_text(), PoolArrays(len(jax.tree.leaves(params)), sizes))
    assert inspection.in_place, inspection.problems
