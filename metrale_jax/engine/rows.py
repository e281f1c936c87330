# SPDX-License-Identifier: Apache-2.0
"""`Rows` and `Chunks`: sequences of a step as the host has them, and as `advance` takes them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from metrale_jax.core.sequence import SequenceState
from metrale_jax.steps.serving import ChunkRows, DecodeRows


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


def decode_rows(rows: Rows, none: Any) -> DecodeRows:
    """`rows` as `advance` takes them to decode; `none` are as many zeros."""
    return DecodeRows(_state(rows, none), rows.slots)


def chunk_rows(chunks: Chunks, none: Any) -> ChunkRows:
    """`chunks` as `advance` takes them; `none` are as many zeros as rows."""
    return ChunkRows(_state(chunks.rows, none), chunks.tokens, chunks.lengths)


def _state(rows: Rows, none: Any) -> SequenceState:
    return SequenceState(
        seq_len=rows.seq_lens,
        prompt_len=rows.known_lens,
        last_token=none,
        block_tables=rows.tables,
        recurrent_slot=rows.slots,
        adapter_slot=none,
        sampling=(),
    )
