# SPDX-License-Identifier: Apache-2.0
"""`Device`: the engine's programs, the pool that they update, and nothing of requests. The one engine module on JAX.

Arrays go in as numpy and results stay on the device until `fetch`. Every call returns before the device is done.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from metrale_jax.core.sequence import SequenceState
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.state.pool import make_pool, zeros
from metrale_jax.steps.build import Steps
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates, ChunkRows, DecodeRows, DrawRows

# Blocks copied by one call: forks copy one block a sequence, and a longer list takes several calls.
COPIES = 8
FAILURES = (ArithmeticError, AssertionError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What running a program may raise, a device's own `JaxRuntimeError` (a RuntimeError) among them."""


@dataclass(frozen=True)
class Rows:
    """Sequences of a step: int32 `slots`, `seq_lens` and `known_lens [S]`, and their block tables `[S, M]` a group."""

    slots: np.ndarray
    seq_lens: np.ndarray
    known_lens: np.ndarray
    tables: tuple


@dataclass(frozen=True)
class Chunks:
    """Sequences that take in prompt tokens: `tokens [T]` laid end to end, `lengths [S]`."""

    rows: Rows
    tokens: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Hidden:
    """Hidden rows on the device: `ends` that tokens can be drawn from, and `chunks`, one for each prompt token run."""

    ends: Any
    chunks: Any


class Device:
    """Runs steps over one model's params and a pool of `num_blocks` blocks a group. `fill` makes the pool's arrays."""

    def __init__(self, steps: Steps, params: DecoderParams, num_blocks: int, shapes: ShapePlan, fill: Callable = zeros):
        self._steps, self._params = steps, params
        self._head = head_of(params)
        layout = steps.model.layout
        self._fresh_pool = partial(make_pool, layout, (num_blocks,) * len(layout.groups), fill)
        self._fresh_tokens = partial(np.zeros, shapes.num_slots + 1, np.int32)
        self.num_groups = len(layout.groups)
        self.reset()

    def reset(self) -> None:
        """Starts from an empty pool: what was in the old one is lost."""
        self.pool, self.last_tokens = self._fresh_pool(), jax.device_put(self._fresh_tokens())

    @property
    def pool_lost(self) -> bool:
        """Whether a step took the pool and failed to give one back."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool))

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far."""
        return self._steps.num_compiles

    def resident(self, arrays: Any) -> Any:
        """`arrays` on the device, for use in several steps."""
        return jax.device_put(arrays)

    def advance(self, decoding: Rows | None, chunks: Chunks | None) -> Hidden:
        """Runs the last tokens of `decoding` and the tokens of `chunks`; one of them may be None."""
        decode = () if decoding is None else decode_rows(decoding)
        fill = () if chunks is None else chunk_rows(chunks)
        self.pool, ends, rows = self._steps.run("advance", self._params, self.pool, self.last_tokens, decode, fill)
        return Hidden(ends, rows)

    def draw(self, hidden: Hidden, picks: np.ndarray | None, rows: DrawRows, num_logprobs: int) -> StepOutput:
        """A token for each of `rows`, drawn from `hidden.ends[picks]`, or from all of them in order where None."""
        ends = self._picked(hidden, picks)
        self.last_tokens, out = self._steps.run(
            "finish", self._head, self.last_tokens, ends, rows, num_logprobs=num_logprobs
        )
        return out

    def candidates(self, hidden: Hidden, picks: np.ndarray | None, rows: DrawRows, num_top: int) -> Candidates:
        """The `num_top` likeliest tokens of each of `rows`, of which none is drawn."""
        return self._steps.run("candidates", self._head, self._picked(hidden, picks), rows, num_top=num_top)

    def _picked(self, hidden: Hidden, picks: np.ndarray | None) -> Any:
        return hidden.ends if picks is None else self._steps.run("pick_rows", hidden.ends, picks)

    def score(self, hidden: Hidden, targets: np.ndarray, num_logprobs: int) -> Any:
        """Log-probabilities of `targets [T]`, one after each prompt token run, and of the likeliest tokens."""
        return self._steps.run("prompt_scores", self._head, hidden.chunks, targets, num_top=num_logprobs)

    def put_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Sets the tokens that `slots` run next."""
        self.last_tokens = self._steps.run("put_tokens", self.last_tokens, slots, tokens)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, before any step that is dispatched later."""
        for start in range(0, len(copies), COPIES):
            sources, targets = (tuple(np.zeros((self.num_groups, COPIES), np.int32)) for _ in range(2))
            for column, copy in enumerate(copies[start : start + COPIES]):
                sources[copy.group][column], targets[copy.group][column] = copy.source, copy.target
            self.pool = self._steps.run("copy_blocks", self.pool, sources, targets)

    @staticmethod
    def fetch(out: Any) -> Any:
        """A result as numpy arrays, once the device has it. Raises what the step that made it raised."""
        return jax.device_get(out)

    @staticmethod
    def trace(directory: str) -> contextlib.AbstractContextManager:
        """A context in which JAX's profiler records to `directory`."""
        return jax.profiler.trace(directory)


def head_of(params: DecoderParams) -> DecoderParams:
    """The part of `params` that turns hidden rows to logits."""
    return DecoderParams(params.embed, (), (), params.head)


def decode_rows(rows: Rows) -> DecodeRows:
    """`rows` as `advance` takes them to decode."""
    return DecodeRows(_state(rows), rows.slots)


def chunk_rows(chunks: Chunks) -> ChunkRows:
    """`chunks` as `advance` takes them."""
    return ChunkRows(_state(chunks.rows), chunks.tokens, chunks.lengths)


def _state(rows: Rows) -> SequenceState:
    none = np.zeros(len(rows.seq_lens), np.int32)
    return SequenceState(
        seq_len=rows.seq_lens,
        prompt_len=rows.known_lens,
        last_token=none,
        block_tables=rows.tables,
        recurrent_slot=none,
        adapter_slot=none,
        sampling=(),
    )
