# SPDX-License-Identifier: Apache-2.0
"""Logits, perplexity and vectors of whole sequences, in chunks over a pool of their own."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.generate import first_state, limited, limited_spans
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.steps.build import Steps
from pallas_kernels.shapes import ceil_div, next_power_of_two

CHUNK_TOKENS = 128
POOLINGS = ("mean", "last")


def chunked_logits(steps: Steps, params: DecoderParams, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Float32 logits `[t, V]` of consecutive chunks of the sequence; row i scores what follows token i.

    Raises `RequestError` for a sequence longer than the model's context.
    """
    for logits, count in chunked(steps, params, token_ids, "score"):
        yield np.asarray(logits)[:count]


def chunked(
    steps: Steps,
    params: DecoderParams,
    token_ids: Sequence[int],
    name: str,
    chunk_tokens: int = CHUNK_TOKENS,
    **static,
) -> Iterator[tuple[Any, int]]:
    """What the step `name` gives for consecutive chunks of the sequence, of up to `chunk_tokens`, and how many tokens
    each has before padding.

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
    size = min(chunk_tokens, next_power_of_two(length))
    for start in range(0, length, size):
        for first, stop in limited_spans(layout, start, min(start + size, length)):
            chunk, count = np.zeros(size, np.int32), stop - first
            chunk[:count] = token_ids[first:stop]
            lengths = np.asarray([count], np.int32)
            pool, state, out = steps.run(name, params, pool, state, chunk, lengths, **static)
            pool = limited(steps, pool, stop)
            yield out, count


def embedding_chunks(
    steps: Steps,
    params: DecoderParams,
    token_ids: Sequence[int],
    pooling: str = "mean",
    normalize: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Generator[int, None, np.ndarray]:
    """A vector of the sequence, float32 `[D]`: the "mean" of the rows behind the model's last norm or the "last" of
    them, of length one if it is to `normalize`. Yields how many tokens are done after each chunk, and returns it.

    Raises `RequestError` for no tokens, or more than the model's context.
    """
    if pooling not in POOLINGS:
        raise RequestError(f"pooling={shown(pooling)} is not one of {', '.join(POOLINGS)}; use one.", "pooling")
    if not len(token_ids):
        raise RequestError("prompt of 0 tokens has no vector; give at least one.", "prompt")
    total, last, done = np.zeros(0), np.zeros(0), 0
    for (hidden,), count in chunked(steps, params, token_ids, "record", chunk_tokens):
        rows = np.asarray(hidden)[:count].astype(np.float64)
        total, last, done = rows.sum(axis=0) + (total if done else 0), rows[-1], done + count
        yield done
    vector = last if pooling == "last" else total / done
    length = np.linalg.norm(vector) if normalize else 1.0
    return (vector / length if length else vector).astype(np.float32)


def embedding(steps: Steps, params: DecoderParams, token_ids: Sequence[int], pooling: str, normalize: bool):
    """What `embedding_chunks` returns, at once."""
    chunks = embedding_chunks(steps, params, token_ids, pooling, normalize)
    while True:
        try:
            next(chunks)
        except StopIteration as ended:
            return ended.value


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
