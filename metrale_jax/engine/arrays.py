# SPDX-License-Identifier: Apache-2.0
"""From host records to the arrays of a step: numpy only."""

from collections.abc import Sequence

import numpy as np

from metrale_jax.engine.buckets import Advance
from metrale_jax.engine.request import Request
from metrale_jax.engine.rows import Chunks, Rows
from metrale_jax.engine.slots import SlotTable


def padded(values: Sequence[int], size: int) -> np.ndarray:
    """int32 `[size]`: the values, then zeros."""
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def step_rows(requests: Sequence[Request], size: int, slots: SlotTable) -> Rows:
    """Where `requests` stand, padded to `size` rows."""
    places = padded([request.slot for request in requests], size)
    return Rows(
        slots=places,
        seq_lens=padded([request.seq_len for request in requests], size),
        known_lens=padded([request.known_len for request in requests], size),
        tables=slots.rows(places),
    )


def step_chunks(chunks: Sequence[tuple[Request, int]], sizes: Advance, slots: SlotTable) -> Chunks:
    """The next tokens of each request, laid end to end."""
    rows = step_rows([request for request, _ in chunks], sizes.chunk_rows, slots)
    tokens = [token for request, size in chunks for token in request.tokens(request.seq_len, request.seq_len + size)]
    return Chunks(rows, padded(tokens, sizes.chunk_tokens), padded([size for _, size in chunks], sizes.chunk_rows))


def score_targets(chunks: Sequence[tuple[Request, int]], num_tokens: int) -> np.ndarray:
    """int32 `[T]`: the prompt token that follows each token of the chunks, 0 where none does."""
    targets = []
    for request, size in chunks:
        following = request.tokens(request.seq_len + 1, min(request.seq_len + size + 1, len(request.prompt)))
        targets += [*following, *[0] * (size - len(following))]
    return padded(targets, num_tokens)
