# SPDX-License-Identifier: Apache-2.0
"""One sequence, start to finish, with nothing optional: no batching, no chunks, no look-ahead.

The first thing to read, where a notebook starts, and the oracle: whatever the engine does, it must give these tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.constraints import Constraint, bad_word_ids, constraint_of, fixed_mask
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import SamplingRow, check_token_ids, needs_extras, sampling_state
from metrale_jax.state.pool import Pool, PoolLayout, zeros
from metrale_jax.steps.build import Steps
from metrale_jax.steps.room import draft_room
from pallas_kernels.shapes import ceil_div


def generate_tokens(
    steps: Steps,
    params: DecoderParams,
    prompt: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    fill: Callable = zeros,
    structure: Constraint | None = None,
) -> list[int]:
    """Token ids of the answer to `prompt`, a stop id included if one ended it.

    `steps` are a model's compiled steps. `sampling.max_tokens` bounds the answer; text-level stops do not apply here,
    bad words are lists of token ids, and `structure` is the constraint of a structured answer. Raises `RequestError`
    where the rules leave no token to draw.
    """
    config, layout = steps.model.config, steps.model.layout
    check_token_ids(sampling, config.vocab_size)
    max_tokens, width = _room(steps, prompt, sampling)
    words = bad_word_ids(sampling.bad_words, _no_text)
    constraint = constraint_of(sampling, config.vocab_size, words, structure)
    pool = steps.make_pool((width + 1,) * len(layout.groups), fill)
    extras = constraint is not None
    state = first_state(layout, len(prompt), width, sampling, seed, stop_ids, config.vocab_size, extras)
    answer: list[int] = []
    while not answer or (answer[-1] not in stop_ids and len(answer) < max_tokens):
        length = len(prompt) + len(answer)
        again = _outgrown(config.recompute_len, len(prompt), length)
        if again:
            # The past is run again under the rotary frequencies of a long sequence.
            fresh = first_state(layout, length, width, sampling, seed, stop_ids, config.vocab_size)
            state = fresh.replace(sampling=state.sampling)
        if constraint is not None:
            state = _masked(state, constraint.mask())
        if again or not answer:
            pool, state, out = _prefilled(steps, params, pool, state, [*prompt, *answer])
        else:
            pool, state, out = steps.run("decode", params, pool, state)
            pool = limited(steps, pool, length)
        if not out.drawable[0, 0]:
            raise RequestError(
                f"no token may be drawn after {length} tokens, of {config.vocab_size}; loosen the rules."
            )
        answer.append(int(out.tokens[0, 0]))
        if constraint is not None:
            constraint.accept(answer[-1])
    return answer


def _room(steps: Steps, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, int]:
    """The most tokens of the answer, and the blocks that prompt and answer take of each group."""
    limit = steps.model.config.max_context_tokens - len(prompt)
    max_tokens = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    return max_tokens, ceil_div(len(prompt) + max_tokens, steps.model.layout.block_size)


def _outgrown(recompute_len: int, prompt_len: int, length: int) -> bool:
    """Whether a sequence has come to where its past is run again."""
    return bool(recompute_len) and length == recompute_len + 1 and prompt_len <= recompute_len


def _prefilled(steps: Steps, params: DecoderParams, pool: Pool, state: SequenceState, tokens: Sequence[int]):
    """Pool, state and output after all `tokens` of a sequence that has run nothing yet."""
    for start, stop in limited_spans(steps.model.layout, 0, len(tokens)):
        part = _ids(tokens[start:stop])
        pool, state, out = steps.run("prefill", params, pool, state, part, _ids([stop - start]))
        pool = limited(steps, pool, stop)
    return pool, state, out


@dataclass(frozen=True)
class Drafted:
    """An answer that was drafted: its `tokens`, and of each step how many drafts it verified and how many stood."""

    tokens: list[int]
    steps: list[tuple[int, int]]

    @property
    def acceptance(self) -> float:
        """Share of drafts that were accepted; 0 without any."""
        proposed = sum(count for count, _ in self.steps)
        return sum(count for _, count in self.steps) / proposed if proposed else 0.0


def generate_speculative(
    steps: Steps,
    params: DecoderParams,
    prompt: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    fill: Callable = zeros,
) -> Drafted:
    """The answer of `generate_tokens`, with tokens drafted by the proposer of the model of `steps`, as many a step as
    it says. Raises `RequestError` for rules that the host keeps: `LLM` drafts under those too."""
    config, layout, num_drafts = steps.model.config, steps.model.layout, steps.model.num_drafts
    check_token_ids(sampling, config.vocab_size)
    if steps.model.proposer is None or constraint_of(sampling, config.vocab_size, sampling.bad_words, None) is not None:
        raise RequestError("drafts need a proposer, and no bad_words of several tokens; load one, or use LLM.")
    max_tokens, width = _room(steps, prompt, sampling)
    pool = steps.make_pool((width + 1,) * len(layout.groups), fill)
    pool = steps.run("begin_slots", pool, _ids([1]), _known(prompt, config.max_context_tokens), np.ones(1, bool))
    state = first_state(layout, len(prompt), width, sampling, seed, stop_ids, config.vocab_size)
    answer: list[int] = []
    drafts: list[tuple[int, int]] = []
    while not answer or (answer[-1] not in stop_ids and len(answer) < max_tokens):
        length = len(prompt) + len(answer)
        again = _outgrown(config.recompute_len, len(prompt), length)
        if again:
            fresh = first_state(layout, length, width, sampling, seed, stop_ids, config.vocab_size)
            state = fresh.replace(sampling=state.sampling)
        if again or not answer:
            pool, state, out = _prefilled(steps, params, pool, state, [*prompt, *answer])
        else:
            room = draft_room(length, max_tokens - len(answer), config.recompute_len, layout.norm_tokens)
            pool, state, out = steps.run("speculate", params, pool, state, _ids([room]), num_drafts=num_drafts)
            pool = limited(steps, pool, length)
            drafts.append((int(out.num_drafts[0]), int(out.num_tokens[0]) - 1))
        count = int(out.num_tokens[0])
        if not np.all(out.drawable[0, :count]):
            raise RequestError(f"no token may be drawn after {length} tokens or a few more; loosen the rules.")
        answer += np.asarray(out.tokens)[0, :count].tolist()
    return Drafted(answer, drafts)


def _known(prompt: Sequence[int], length: int) -> np.ndarray:
    known = np.zeros((1, length), np.int32)
    known[0, : len(prompt)] = prompt
    return known


def limited_spans(layout: PoolLayout, start: int, stop: int) -> list[tuple[int, int]]:
    """Tokens `start` to `stop` in spans that end where recurrent states are limited."""
    every = layout.norm_tokens or stop
    ends = [*range((start // every + 1) * every, stop, every), stop]
    return list(zip([start, *ends[:-1]], ends, strict=True))


def limited(steps: Steps, pool: Pool, length: int) -> Pool:
    """The pool of one sequence, in slot 1, after `length` tokens: its recurrent state is limited where it is due."""
    layout = steps.model.layout
    if not layout.norm_tokens or length % layout.norm_tokens:
        return pool
    return steps.run("limit_slots", pool, _ids([1]), layout.max_norms)


def first_state(
    layout: PoolLayout,
    prompt_len: int,
    table_width: int,
    sampling: SamplingParams,
    seed: int,
    stop_ids: Sequence[int],
    vocab_size: int,
    extras: bool = False,
) -> SequenceState:
    """A batch of one sequence that has run nothing yet and holds blocks 1 to `table_width` of every group, and slot 1.

    It has `SamplingExtras` where `sampling` needs them or `extras` asks for them; bad words are lists of token ids.
    """
    zero = _ids([0])
    mask = fixed_mask(sampling, vocab_size, bad_word_ids(sampling.bad_words, _no_text))
    row = SamplingRow(sampling, seed, stop_ids, prompt_len, (), mask)
    history_len = table_width * layout.block_size if extras or needs_extras(sampling) else 0
    return SequenceState(
        seq_len=zero,
        prompt_len=_ids([prompt_len]),
        last_token=zero,
        block_tables=tuple(np.arange(1, table_width + 1, dtype=np.int32)[None] for _ in layout.groups),
        recurrent_slot=_ids([1]),
        adapter_slot=zero,
        sampling=sampling_state([row], vocab_size, max(1, len(stop_ids)), history_len),
    )


def _masked(state: SequenceState, mask: np.ndarray) -> SequenceState:
    sampling = state.sampling
    return state.replace(sampling=sampling.replace(extras=sampling.extras.replace(mask=mask[None])))


def _no_text(word: str) -> Sequence[int]:
    raise RequestError(f"bad_words={word!r} is a text, tokens are compared here; give its token ids.")


def _ids(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)
