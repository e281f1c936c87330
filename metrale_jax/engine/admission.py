# SPDX-License-Identifier: Apache-2.0
"""What a request must satisfy before it is queued, checked once and told with numbers."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import ContextLengthError, RequestError, shown
from metrale_jax.engine.request import Request
from metrale_jax.sampling.constraints import Constraint, constraint_of, fixed_mask
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import check_token_ids
from pallas_kernels.shapes import ceil_div

# What has a length and items, and yet is no list of token ids or prompts.
NO_SEQUENCES = (bytes, bytearray, memoryview, Mapping, Set)
# Sees the new tokens of an answer as they stand, and ends it by returning true.
Watch = Callable[[list[int]], bool]


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

    `bad_words` are those of `params` as token ids and `structure` what its structured form allows. `namespace` parts
    cached prefixes that equal tokens do not make equal.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seeds: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    bad_words: Sequence[Sequence[int]] = ()
    structure: Constraint | None = None
    namespace: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Admitted:
    """An `ask` that an engine of given `Limits` can serve, with all that its requests have in common.

    Each of its answers has up to `max_tokens`, ended by `stop_ids` among others. `constraint` is to be forked for each.
    """

    ask: Ask
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    fixed_mask: np.ndarray | None
    constraint: Constraint | None

    def request(self, request_id: int, sample: int, now: float, watch: Watch | None) -> Request:
        """A request for answer `sample`, to be queued."""
        params = self.ask.params
        return Request(
            request_id=request_id,
            prompt=self.prompt,
            params=params,
            seed=self.ask.seeds[sample],
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            queued_at=now,
            watch=watch,
            fixed_mask=self.fixed_mask,
            constraint=None if self.constraint is None else self.constraint.fork(),
            namespace=(*self.ask.namespace, params.cache_salt),
        )


def admitted(ask: Ask, limits: Limits) -> Admitted:
    """The ask with what follows of it. Raises `RequestError` naming the value, the limit and the way out."""
    tokens, params = checked_tokens(ask.prompt, limits.vocab_size), ask.params
    check_room(len(tokens), limits)
    check_params(params, limits)
    room = limits.max_context_tokens - len(tokens)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    blocks = ceil_div(len(tokens) + max_tokens, limits.block_size) + 1
    if blocks > limits.usable_blocks:
        raise RequestError(
            f"prompt of {len(tokens)} and answer of {max_tokens} tokens need {blocks} KV blocks, the cache has "
            f"{limits.usable_blocks}; lower max_tokens, or raise kv_cache_bytes.",
            "max_tokens",
        )
    against = {"min_tokens": params.min_tokens, "ignore_eos": params.ignore_eos}
    given = {name: value for name, value in against.items() if value}
    if ask.structure is not None and given:
        raise RequestError(
            f"{' and '.join(f'{name}={value}' for name, value in given.items())} cannot be had with a structured "
            "answer, which ends where it is complete; leave it out.",
            next(iter(given)),
        )
    found = Admitted(
        ask=ask,
        prompt=tokens,
        max_tokens=max_tokens,
        stop_ids=_stop_ids(ask, limits),
        fixed_mask=fixed_mask(params, limits.vocab_size, ask.bad_words),
        constraint=constraint_of(params, limits.vocab_size, ask.bad_words, ask.structure),
    )
    if params.beam_width:
        check_search(found, limits)
    return found


def check_room(num_tokens: int, limits: Limits) -> None:
    """Nothing. Raises `ContextLengthError` for a prompt of that many tokens, or more, which leaves no room."""
    context = limits.max_context_tokens
    if num_tokens >= context:
        raise ContextLengthError(
            f"prompt of {num_tokens} tokens leaves no room in a context of {context}; shorten it, or raise "
            "max_context_tokens or kv_cache_mib, whichever binds.",
            "prompt",
        )


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Nothing. Raises `RequestError` for params that no prompt is served with."""
    if params.n > limits.max_sequences:
        raise RequestError(
            f"n={params.n} answers are above the {limits.max_sequences} sequences that run at once; ask for fewer, "
            "or raise max_sequences.",
            "n",
        )
    check_token_ids(params, limits.vocab_size)


def check_search(search: Admitted, limits: Limits) -> None:
    """Nothing. Raises `RequestError` for a beam search that an engine cannot hold or that asks for what it does not
    do."""
    params, prompt_len = search.ask.params, len(search.prompt)
    width, total = params.beam_width, prompt_len + search.max_tokens
    if width > limits.max_sequences:
        raise RequestError(
            f"beam_width={width} is above the {limits.max_sequences} sequences that run at once; use fewer beams, or "
            "raise max_sequences.",
            "beam_width",
        )
    if search.constraint is not None or params.stop:
        raise RequestError(
            f"beam_width={width} with stop strings, bad words of several tokens or structured output is not searched; "
            "leave them out, or sample.",
            "beam_width",
        )
    if params.logprobs is not None:
        raise RequestError(
            f"logprobs={params.logprobs} with beam_width={width} is not given; read the results' score.", "logprobs"
        )
    if prompt_len <= limits.recompute_len < total:
        raise RequestError(
            f"beams from {prompt_len} to {total} tokens pass {limits.recompute_len}, where this model's past is run "
            "again; ask for fewer tokens, or sample.",
            "max_tokens",
        )
    shared = prompt_len // limits.block_size
    needed = shared + width * (ceil_div(total, limits.block_size) - shared + 2)
    if needed > limits.usable_blocks:
        raise RequestError(
            f"{width} beams of up to {search.max_tokens} tokens need {needed} KV blocks, the cache has "
            f"{limits.usable_blocks}; use fewer beams or tokens, or raise kv_cache_bytes.",
            "beam_width",
        )


def _stop_ids(ask: Ask, limits: Limits) -> frozenset[int]:
    own = () if ask.params.ignore_eos else ask.eos_token_ids
    stop_ids = tuple(dict.fromkeys([*own, *ask.params.stop_token_ids]))
    if ask.params.min_tokens and len(stop_ids) > limits.max_stop_ids:
        raise RequestError(
            f"{len(stop_ids)} stop ids with min_tokens are above the limit of {limits.max_stop_ids}; name fewer.",
            "stop_token_ids",
        )
    return frozenset(stop_ids)


def checked_tokens(prompt: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The prompt as plain ints. Raises `RequestError` for an empty one or ids out of range."""
    if isinstance(prompt, NO_SEQUENCES):
        kind = type(prompt).__name__
        raise RequestError(f"prompt {shown(prompt)} is a {kind}; give a text or a list of token ids.", "prompt")
    if len(prompt) == 0:
        raise RequestError("prompt of 0 tokens is empty; give at least one token.", "prompt")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(f"prompt holds {shown(token)}, which is no token id; give integers.", "prompt")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {shown(token)} is outside the vocabulary of {vocab_size}; give ids from 0 to "
                f"{vocab_size - 1}.",
                "prompt",
            )
    return tuple(int(token) for token in prompt)
