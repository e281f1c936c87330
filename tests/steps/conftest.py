# SPDX-License-Identifier: Apache-2.0
"""Batches over a stored checkpoint at a few fixed shapes, so that few programs are compiled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.sequence import SequenceState, stack_states
from metrale_jax.generate import first_state
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import make_pool

# The shapes of tests/engine: what is compiled for one serves the other.
BLOCK_SIZE, TABLE_WIDTH, STOP_IDS, NUM_BLOCKS = 8, 8, 8, 73
DECODE_ROWS, PREFILL_ROWS, PREFILL_TOKENS = 8, 4, 64
GREEDY = SamplingParams(temperature=0)


class Bench:
    """One checkpoint's steps, run at fixed shapes. A row of a batch owns `TABLE_WIDTH` blocks of its own."""

    def __init__(self, golden):
        self.golden, self.config, self.layout = golden, golden.config, golden.layout
        self.prompt = golden.prompt

    def pool(self):
        """Memory of NaN."""
        num_blocks = (NUM_BLOCKS,) * len(self.layout.groups)
        return make_pool(self.layout, num_blocks, lambda spec: jnp.full(spec.shape, jnp.nan, spec.dtype))

    def row(self, place: int, prompt_len: int, params: SamplingParams = GREEDY, seed: int = 0, extras: bool = False):
        """A sequence that has run nothing, in blocks of its own: batch row `place`. All rows of a batch have extras."""
        vocab = self.config.vocab_size
        stops = [*params.stop_token_ids, *[vocab] * (STOP_IDS - len(params.stop_token_ids))]
        state = first_state(self.layout, prompt_len, TABLE_WIDTH, params, seed, stops, vocab, extras)
        tables = tuple(table + place * TABLE_WIDTH for table in state.block_tables)
        return state.replace(block_tables=tables)

    def padded(self, rows: Sequence[SequenceState], num_rows: int) -> SequenceState:
        """A batch of `rows`, filled up with padding."""
        empty = jax.tree.map(np.zeros_like, rows[0])
        return stack_states([*rows, *[empty] * (num_rows - len(rows))])

    def run(self, name, pool, state, *rest):
        """A step at its own shapes."""
        return self.golden.steps.run(name, self.golden.params, pool, state, *rest, num_logprobs=0)

    def chunk(self, chunks: Sequence[Sequence[int]]):
        """Flat tokens and lengths of a prefill step."""
        flat = [int(token) for chunk in chunks for token in chunk]
        tokens = np.asarray([*flat, *[0] * (PREFILL_TOKENS - len(flat))], np.int32)
        lengths = [*map(len, chunks), *[0] * (PREFILL_ROWS - len(chunks))]
        return tokens, np.asarray(lengths, np.int32)

    def prefill(self, pool, rows: Sequence[SequenceState], chunks: Sequence[Sequence[int]]):
        """Pool, the rows after their chunks and the token that each drew."""
        pool, state, out = self.run("prefill", pool, self.padded(rows, PREFILL_ROWS), *self.chunk(chunks))
        return pool, [self.take(state, index) for index in range(len(rows))], np.asarray(out.tokens)[: len(rows), 0]

    def decode(self, pool, rows: Sequence[SequenceState], count: int):
        """Pool, the rows after `count` steps and the tokens `[rows, count]`."""
        state, columns = self.padded(rows, DECODE_ROWS), []
        for _ in range(count):
            pool, state, out = self.run("decode", pool, state)
            assert np.asarray(out.finite)[: len(rows)].all()
            assert np.asarray(out.num_tokens).tolist() == [1] * len(rows) + [0] * (DECODE_ROWS - len(rows))
            columns.append(np.asarray(out.tokens)[: len(rows), 0])
        return pool, [self.take(state, index) for index in range(len(rows))], np.stack(columns, axis=1)

    @staticmethod
    def take(state: SequenceState, index: int) -> SequenceState:
        """One row as a batch of its own, on the host."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[index : index + 1], state)


@pytest.fixture(scope="session")
def bench(golden):
    """`bench(name)`: a checkpoint's steps at fixed shapes."""
    made = {}

    def make(name: str) -> Bench:
        if name not in made:
            made[name] = Bench(golden(name, BLOCK_SIZE))
        return made[name]

    return make
