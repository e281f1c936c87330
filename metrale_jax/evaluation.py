# SPDX-License-Identifier: Apache-2.0
"""Logits and perplexity of whole sequences, in chunks over a pool of their own."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.generate import first_state, limited, limited_spans
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.steps.build import Steps
from pallas_kernels.shapes import ceil_div, next_power_of_two

CHUNK_TOKENS = 128


def chunked_logits(steps: Steps, params: DecoderParams, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Float32 logits `[t, V]` of consecutive chunks of the sequence; row i scores what follows token i.

    Raises `RequestError` for a sequence longer than the model's context.
    """
    for logits, count in chunked(steps, params, token_ids, "score"):
        yield np.asarray(logits)[:count]


def chunked(
    steps: Steps, params: DecoderParams, token_ids: Sequence[int], name: str, **static
) -> Iterator[tuple[Any, int]]:
    """What the step `name` gives for consecutive chunks of the sequence, and how many tokens each has before padding.

    Raises `RequestError` for a sequence longer than the model's context.
    """
    config, layout = steps.model.config, steps.model.layout
    length = len(token_ids)
    if length > config.max_context_tokens:
        raise RequestError(
            f"sequence of {length} tokens is above the context of {config.max_context_tokens}; cut it into parts.",
            "prompt",
        )
    # Table and pool in powers of two keep the number of shapes small.
    width = next_power_of_two(ceil_div(length, layout.block_size))
    pool = steps.make_pool((width + 1,) * len(layout.groups))
    state = first_state(layout, length, width, SamplingParams(temperature=0), 0, (), config.vocab_size)
    size = min(CHUNK_TOKENS, next_power_of_two(length))
    for start in range(0, length, size):
        for first, stop in limited_spans(layout, start, min(start + size, length)):
            chunk, count = np.zeros(size, np.int32), stop - first
            chunk[:count] = token_ids[first:stop]
            lengths = np.asarray([count], np.int32)
            pool, state, out = steps.run(name, params, pool, state, chunk, lengths, **static)
            pool = limited(steps, pool, stop)
            yield out, count


def token_nlls(steps: Steps, params: DecoderParams, token_ids: Sequence[int]) -> np.ndarray:
    """Negative log-likelihoods in nats of tokens 1 on, float64 `[T - 1]`."""
    targets = np.asarray(token_ids[1:], np.int64)
    values, start = [], 0
    for logits in chunked_logits(steps, params, token_ids):
        wanted = targets[start : start + len(logits)]
        rows = logits[: len(wanted)].astype(np.float64)
        highest = rows.max(axis=1, keepdims=True)
        total = np.log(np.exp(rows - highest).sum(axis=1)) + highest[:, 0]
        values.append(total - rows[np.arange(len(wanted)), wanted])
        start += len(logits)
    return np.concatenate(values)
