# SPDX-License-Identifier: Apache-2.0
"""What a request must satisfy before it is queued, checked once and told with numbers."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.engine.request import Request
from metrale_jax.sampling.constraints import Constraint, constraint_of, fixed_mask
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import check_token_ids
from pallas_kernels.shapes import ceil_div

# What has a length and items, and yet is no list of token ids or prompts.
NO_SEQUENCES = (bytes, bytearray, memoryview, Mapping, Set)


@dataclass(frozen=True)
class Limits:
    """What an engine can hold: tokens a sequence, sequences at once, blocks in all, stop ids a row, ids of its
    vocabulary. `recompute_len` is the model's: a sequence that grows past it is run again. After every `norm_tokens` of
    a sequence its recurrent state is limited, and a chunk ends; 0 for never."""

    max_context_tokens: int
    max_sequences: int
    vocab_size: int
    block_size: int
    usable_blocks: int
    max_stop_ids: int
    recompute_len: int = 0
    norm_tokens: int = 0


@dataclass(frozen=True)
class Ask:
    """What a caller wants: `params.n` answers to `prompt`, drawn with `seeds`, ended by `eos_token_ids`.

    `watches[i](new_tokens) -> bool` sees answer i's tokens as they stand and ends it by returning true. `bad_words` are
    those of `params` as token ids and `structure` what its structured form allows. `namespace` parts cached prefixes
    that equal tokens do not make equal.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seeds: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    watches: Sequence[Callable[[list[int]], bool] | None] = ()
    bad_words: Sequence[Sequence[int]] = ()
    structure: Constraint | None = None
    namespace: tuple[Hashable, ...] = ()


def checked_request(request_id: int, ask: Ask, sample: int, limits: Limits, now: float) -> Request:
    """A queued request for answer `sample`. Raises `RequestError` naming the value, the limit and the way out."""
    tokens = checked_tokens(ask.prompt, limits.vocab_size)
    context = limits.max_context_tokens
    if len(tokens) >= context:
        raise RequestError(
            f"prompt of {len(tokens)} tokens leaves no room in a context of {context}; shorten it, or raise "
            "max_context_tokens."
        )
    if ask.params.n > limits.max_sequences:
        raise RequestError(
            f"n={ask.params.n} answers are above the {limits.max_sequences} sequences that run at once; ask for fewer, "
            "or raise max_sequences."
        )
    room = context - len(tokens)
    max_tokens = room if ask.params.max_tokens is None else min(ask.params.max_tokens, room)
    blocks = ceil_div(len(tokens) + max_tokens, limits.block_size) + 1
    if blocks > limits.usable_blocks:
        raise RequestError(
            f"prompt of {len(tokens)} and answer of {max_tokens} tokens need {blocks} KV blocks, the cache has "
            f"{limits.usable_blocks}; lower max_tokens, or raise kv_cache_bytes."
        )
    check_token_ids(ask.params, limits.vocab_size)
    against = {"min_tokens": ask.params.min_tokens, "ignore_eos": ask.params.ignore_eos}
    given = " and ".join(f"{name}={value}" for name, value in against.items() if value)
    if ask.structure is not None and given:
        raise RequestError(
            f"{given} cannot be had with a structured answer, which ends where it is complete; leave it out."
        )
    structure = ask.structure.fork() if ask.structure is not None else None
    return Request(
        request_id=request_id,
        prompt=tokens,
        params=ask.params,
        seed=ask.seeds[sample],
        stop_ids=_stop_ids(ask, limits),
        max_tokens=max_tokens,
        queued_at=now,
        watch=ask.watches[sample] if ask.watches else None,
        fixed_mask=fixed_mask(ask.params, limits.vocab_size, ask.bad_words),
        constraint=constraint_of(ask.params, limits.vocab_size, ask.bad_words, structure),
        namespace=(*ask.namespace, ask.params.cache_salt),
    )


def _stop_ids(ask: Ask, limits: Limits) -> frozenset[int]:
    own = () if ask.params.ignore_eos else ask.eos_token_ids
    stop_ids = tuple(dict.fromkeys([*own, *ask.params.stop_token_ids]))
    if ask.params.min_tokens and len(stop_ids) > limits.max_stop_ids:
        raise RequestError(
            f"{len(stop_ids)} stop ids with min_tokens are above the limit of {limits.max_stop_ids}; name fewer."
        )
    return frozenset(stop_ids)


def checked_tokens(prompt: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The prompt as plain ints. Raises `RequestError` for an empty one or ids out of range."""
    if isinstance(prompt, NO_SEQUENCES):
        raise RequestError(f"prompt {shown(prompt)} is a {type(prompt).__name__}; give a text or a list of token ids.")
    if len(prompt) == 0:
        raise RequestError("prompt of 0 tokens is empty; give at least one token.")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(f"prompt holds {shown(token)}, which is no token id; give integers.")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {shown(token)} is outside the vocabulary of {vocab_size}; give ids from 0 to "
                f"{vocab_size - 1}."
            )
    return tuple(int(token) for token in prompt)
