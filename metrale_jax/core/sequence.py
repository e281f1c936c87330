# SPDX-License-Identifier: Apache-2.0
"""`SequenceState`: everything a step needs to know of its sequences, as one immutable pytree.

A batch is the same pytree with a leading axis `S` of sequences; `stack_states` makes one. Steps return a new
state and leave the old one valid for as long as its lease holds the blocks that it names.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct


@struct.dataclass
class SamplingExtras:
    """Rules that few requests ask for, over sequences; `sampling/rules.py` says what each does.

    float32 `[S]`: `repetition_penalty` (1 is off), `presence_penalty`, `frequency_penalty` (0 is off). int32
    `output_start [S]`, the position of the first drawn token. int32 `history [S, C]`, token ids by position; entries
    at or past the position being drawn are not read. int32 `bias_ids [S, NB]`, padded with the vocabulary size, and
    float32 `bias_values`. uint32 `mask [S, ceil(V / 32)]`: bit `i % 32` of word `i // 32` set lets token `i` be
    drawn; `[S, Q, ceil(V / 32)]` has one for each of the `Q` positions that a step draws.
    """

    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    output_start: Any
    history: Any
    bias_ids: Any
    bias_values: Any
    mask: Any


@struct.dataclass
class SamplingState:
    """Sampling parameters over sequences.

    float32 `[S]`: `temperature` (0 is greedy), `top_n_sigma` (0 is off), `top_p`, `min_p`, `typical_p` (1 is off).
    int32 `[S]`: `top_k` (0 is off), `min_len`, the length in tokens below which none of `stop_ids` may be drawn. int32
    `stop_ids [S, E]`, which end an answer, padded with the vocabulary size. uint32 `seed [S]`. `extras`:
    `SamplingExtras`, or `()` for a batch in which no row needs them.
    """

    temperature: Any
    top_n_sigma: Any
    top_k: Any
    top_p: Any
    min_p: Any
    typical_p: Any
    seed: Any
    min_len: Any
    stop_ids: Any
    extras: Any = ()


@struct.dataclass
class SequenceState:
    """Where each sequence of a batch stands.

    int32 `[S]`: `seq_len`, tokens whose keys and values are in the pool; `prompt_len`, the length known when the
    sequence was first run; `last_token`, the next step's input; `recurrent_slot` and `adapter_slot`, 0 for none.
    `block_tables`: for each group of attention layers int32 `[S, M]` block ids. `sampling`: a `SamplingState`, or `()`
    where nothing is drawn.
    `proposer`: the proposer's opaque pytree. A row with `seq_len` 0 and a zero table is padding.
    """

    seq_len: Any
    prompt_len: Any
    last_token: Any
    block_tables: tuple
    recurrent_slot: Any
    adapter_slot: Any
    sampling: Any
    proposer: Any = ()


def stack_states(states: Sequence[SequenceState]) -> SequenceState:
    """One batch of all the sequences of `states`, in order. Tables must be of one width."""
    return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *states)


def select_rows(state: SequenceState, rows: Sequence[int]) -> SequenceState:
    """The sequences at `rows`, as a batch of their own."""
    index = np.asarray(rows, np.int32)
    return jax.tree.map(lambda leaf: leaf[index], state)
