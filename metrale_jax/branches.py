# SPDX-License-Identifier: Apache-2.0
"""`Branch`: a sequence as a value, and how another comes of it. `forking` has the pool that branches lie in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.steps.outcome import StepOutput


@dataclass(frozen=True, eq=False)
class Branch:
    """A sequence: its `tokens`, of which the last has not been run yet, and the `state` of all before it, one row.

    The first `prompt_len` tokens are the prompt. `logprobs` are those of the tokens after it by the raw logits, 0 for
    those that were given. `likeliest` are the tokens that the model found likeliest in the last one's place, with their
    `likeliest_logprobs`; both are empty where that was given.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    state: SequenceState
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[int, ...] = ()
    likeliest_logprobs: tuple[float, ...] = ()

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    @property
    def logprob(self) -> float:
        """The log-probability of the answer, as far as it was drawn or chosen."""
        return sum(self.logprobs)

    @property
    def num_run(self) -> int:
        """How many of its tokens have been run."""
        return max(0, len(self.tokens) - 1)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Ids of the blocks that hold its tokens, the same in every group of layers."""
        return tuple(int(block) for block in self.state.block_tables[0][0] if block)

    @property
    def slot(self) -> int:
        """Id of the slot that holds its recurrent state."""
        return int(self.state.recurrent_slot[0])

    def placed(self, blocks: Sequence[int], slot: int) -> "Branch":
        """The same, held by these blocks and this slot."""
        table = np.zeros_like(self.state.block_tables[0])
        table[0, : len(blocks)] = blocks
        tables = (table,) * len(self.state.block_tables)
        return replace(self, state=self.state.replace(block_tables=tables, recurrent_slot=ids([slot])))

    def given(self, tokens: Sequence[int], logprobs: Sequence[float]) -> "Branch":
        """With `tokens` more, all run but the last of them."""
        grown = (*self.tokens, *map(int, tokens))
        state = self.state.replace(seq_len=ids([len(grown) - 1]), last_token=ids(grown[-1:]))
        return Branch(grown, self.prompt_len, state, (*self.logprobs, *logprobs))

    def drawn(self, out: StepOutput, row: int) -> "Branch":
        """With the token that a step drew in `row`."""
        token, logprob = int(out.tokens[row, 0]), float(out.logprobs[row, 0])
        return replace(
            self.given([token], [logprob]),
            likeliest=tuple(map(int, out.top_ids[row, 0])),
            likeliest_logprobs=tuple(map(float, out.top_logprobs[row, 0])),
        )

    def choosing(self, token: int) -> "Branch":
        """With another of the likeliest tokens as the last. Raises `RequestError` for one that is not among them."""
        if token not in self.likeliest:
            raise RequestError(
                f"token {token} is not among the {len(self.likeliest)} likeliest of this branch; extend a fork of "
                "what comes before, or start with a higher num_likeliest."
            )
        logprob = self.likeliest_logprobs[self.likeliest.index(token)]
        state = self.state.replace(last_token=ids([token]))
        return replace(self, tokens=(*self.tokens[:-1], token), state=state, logprobs=(*self.logprobs[:-1], logprob))

    def drawing_by(self, seed: int) -> "Branch":
        """With the noise of another seed from here on."""
        sampling = self.state.sampling.replace(seed=np.asarray([seed], np.uint32))
        return replace(self, state=self.state.replace(sampling=sampling))

    def shortened(self, length: int) -> "Branch":
        """The first `length` tokens alone."""
        if not 1 <= length <= len(self.tokens):
            raise RequestError(f"length={length} is not from 1 to the {len(self.tokens)} tokens of this branch.")
        if length == len(self.tokens):
            return self
        tokens = self.tokens[:length]
        state = self.state.replace(seq_len=ids([length - 1]), last_token=ids(tokens[-1:]))
        return Branch(tokens, min(self.prompt_len, length), state, self.logprobs[: max(0, length - self.prompt_len)])


def ids(values: Sequence[int]) -> np.ndarray:
    """Ids or lengths, as steps take them."""
    return np.asarray(values, np.int32)
