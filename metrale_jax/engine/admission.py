# SPDX-License-Identifier: Apache-2.0
"""What a request must satisfy before it is queued, checked once and told with numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.request import Request
from metrale_jax.sampling.params import SamplingParams
from pallas_kernels.shapes import ceil_div


@dataclass(frozen=True)
class Limits:
    """What an engine can hold: tokens a sequence, blocks in all, stop ids a row, and ids of its vocabulary."""

    max_context_tokens: int
    vocab_size: int
    block_size: int
    usable_blocks: int
    max_stop_ids: int


@dataclass(frozen=True)
class Ask:
    """What a caller wants: see `Engine.submit`."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    watch: Callable[[list[int]], bool]


def checked_request(request_id: int, ask: Ask, limits: Limits, now: float) -> Request:
    """A queued request. Raises `RequestError` naming the value, the limit and the way out."""
    tokens = checked_tokens(ask.prompt, limits.vocab_size)
    context = limits.max_context_tokens
    if len(tokens) >= context:
        raise RequestError(
            f"prompt of {len(tokens)} tokens leaves no room in a context of {context}; shorten it, or raise "
            "max_context_tokens."
        )
    room = context - len(tokens)
    max_tokens = room if ask.params.max_tokens is None else min(ask.params.max_tokens, room)
    blocks = ceil_div(len(tokens) + max_tokens, limits.block_size) + 1
    if blocks > limits.usable_blocks:
        raise RequestError(
            f"prompt of {len(tokens)} and answer of {max_tokens} tokens need {blocks} KV blocks, the cache has "
            f"{limits.usable_blocks}; lower max_tokens, or raise kv_cache_bytes."
        )
    stop_ids = _stop_ids(ask, limits)
    return Request(request_id, tokens, ask.params, ask.seed, stop_ids, max_tokens, ask.watch, now)


def _stop_ids(ask: Ask, limits: Limits) -> tuple[int, ...]:
    for token in ask.params.stop_token_ids:
        if token >= limits.vocab_size:
            raise RequestError(
                f"stop_token_ids={token} is not below the vocabulary's {limits.vocab_size}; leave it out."
            )
    own = () if ask.params.ignore_eos else ask.eos_token_ids
    stop_ids = tuple(dict.fromkeys([*own, *ask.params.stop_token_ids]))
    if ask.params.min_tokens and len(stop_ids) > limits.max_stop_ids:
        raise RequestError(
            f"{len(stop_ids)} stop ids with min_tokens are above the limit of {limits.max_stop_ids}; name fewer."
        )
    return stop_ids


def checked_tokens(prompt: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The prompt as plain ints. Raises `RequestError` for an empty one or ids out of range."""
    if len(prompt) == 0:
        raise RequestError("prompt of 0 tokens is empty; give at least one token.")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(f"prompt holds {token!r}, which is no token id; give integers.")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} is outside the vocabulary of {vocab_size}; give ids from 0 to {vocab_size - 1}."
            )
    return tuple(int(token) for token in prompt)
