# SPDX-License-Identifier: Apache-2.0
"""From host records to the arrays of a step: numpy only."""

from collections.abc import Sequence

import numpy as np

from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.request import Request
from metrale_jax.sampling.rows import SamplingRow, sampling_state


def rows_state(rows: Sequence[Request | None], shapes: ShapePlan, num_groups: int, vocab_size: int) -> SequenceState:
    """The states of `rows`, from the host's knowledge alone; None is a padding row."""

    def column(dtype, empty, value_of):
        return np.asarray([empty if row is None else value_of(row) for row in rows], dtype)

    return SequenceState(
        seq_len=column(np.int32, 0, lambda r: r.seq_len),
        prompt_len=column(np.int32, 0, lambda r: r.known_len),
        last_token=column(np.int32, 0, lambda r: r.output[-1] if r.output else 0),
        block_tables=block_tables(rows, shapes, num_groups),
        recurrent_slot=np.zeros(len(rows), np.int32),
        adapter_slot=np.zeros(len(rows), np.int32),
        sampling=_sampling(rows, shapes, vocab_size),
    )


def block_tables(rows: Sequence[Request | None], shapes: ShapePlan, num_groups: int) -> tuple[np.ndarray, ...]:
    """int32 `[S, M]` for each group, zero past the blocks that a row holds."""
    tables = tuple(np.zeros((len(rows), shapes.table_width), np.int32) for _ in range(num_groups))
    for index, row in enumerate(rows):
        if row is not None:
            for table, blocks in zip(tables, row.lease.tables, strict=True):
                table[index, : len(blocks)] = blocks
    return tables


def seq_lens(rows: Sequence[Request | None]) -> np.ndarray:
    """int32 `[S]`, zero for padding."""
    return np.asarray([0 if row is None else row.seq_len for row in rows], np.int32)


def chunk_tokens(chunks: Sequence[tuple[Request, int]], num_tokens: int, num_rows: int):
    """int32 tokens `[T]` of the chunks laid end to end, and their lengths `[S]`, zero past the last chunk."""
    flat, lengths = np.zeros(num_tokens, np.int32), np.zeros(num_rows, np.int32)
    start = 0
    for index, (request, size) in enumerate(chunks):
        flat[start : start + size] = request.tokens(request.seq_len, request.seq_len + size)
        lengths[index] = size
        start += size
    return flat, lengths


def _sampling(rows, shapes: ShapePlan, vocab_size: int) -> SamplingState:
    asked = [None if row is None else SamplingRow(row.params, row.seed, row.stop_ids, len(row.prompt)) for row in rows]
    return sampling_state(asked, vocab_size, shapes.stop_ids)
