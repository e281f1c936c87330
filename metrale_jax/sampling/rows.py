# SPDX-License-Identifier: Apache-2.0
"""From requests to the rows of a `SamplingState`: numpy only, for whoever makes batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.core.sequence import SamplingExtras, SamplingState
from metrale_jax.sampling.constraints import full_mask
from metrale_jax.sampling.params import MAX_LOGIT_BIAS, SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """One sequence as sampling sees it.

    `stop_ids` end its answer; `min_tokens` holds them back. `tokens` are prompt and answer as far as the host knows
    them; those that steps run or draw later are written on the device. `mask` are the words of a constraint, or none.
    """

    params: SamplingParams
    seed: int
    stop_ids: Sequence[int]
    prompt_len: int
    tokens: Sequence[int] = ()
    mask: np.ndarray | None = None


def needs_extras(params: SamplingParams) -> bool:
    """Whether a batch with this request must carry `SamplingExtras`."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    masks = params.allowed_token_ids is not None or params.banned_token_ids or params.bad_words or params.structured
    return bool(penalties or masks or params.logit_bias)


def sampling_state(
    rows: Sequence[SamplingRow | None], vocab_size: int, num_stop_ids: int, history_len: int = 0
) -> SamplingState:
    """The state of `rows`; None is padding. With extras where `history_len`, the tokens a sequence can have, is given.

    `num_stop_ids` is the width of `stop_ids`; rows have at most as many where they ask for `min_tokens`. Of others the
    first serve: that an answer ends is told by the host in any case.
    """
    stop_ids = np.full((len(rows), num_stop_ids), vocab_size, np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            first = list(row.stop_ids)[:num_stop_ids]
            stop_ids[index, : len(first)] = first
    column = _columns(rows)
    return SamplingState(
        temperature=column(np.float32, 0, lambda r: r.params.temperature),
        top_n_sigma=column(np.float32, 0, lambda r: r.params.top_n_sigma),
        top_k=column(np.int32, 0, lambda r: max(0, min(r.params.top_k, vocab_size))),
        top_p=column(np.float32, 1, lambda r: r.params.top_p),
        min_p=column(np.float32, 0, lambda r: r.params.min_p),
        typical_p=column(np.float32, 1, lambda r: r.params.typical_p),
        seed=column(np.uint32, 0, lambda r: r.seed),
        min_len=column(np.int32, 0, lambda r: r.prompt_len + r.params.min_tokens if r.params.min_tokens else 0),
        stop_ids=stop_ids,
        extras=sampling_extras(rows, vocab_size, history_len) if history_len else (),
    )


def sampling_extras(rows: Sequence[SamplingRow | None], vocab_size: int, history_len: int) -> SamplingExtras:
    """The extras of `rows`; those of padding, and of rows that ask for none of the rules, change nothing."""
    num_rows = len(rows)
    history = np.zeros((num_rows, history_len), np.int32)
    bias_ids = np.full((num_rows, MAX_LOGIT_BIAS), vocab_size, np.int32)
    bias_values = np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32)
    mask = np.broadcast_to(full_mask(vocab_size), (num_rows, full_mask(vocab_size).size)).copy()
    for index, row in enumerate(rows):
        if row is None:
            continue
        history[index, : len(row.tokens)] = row.tokens
        if row.params.logit_bias:
            ids, values = zip(*row.params.logit_bias, strict=True)
            bias_ids[index, : len(ids)] = ids
            bias_values[index, : len(ids)] = values
        if row.mask is not None:
            mask[index] = row.mask
    column = _columns(rows)
    return SamplingExtras(
        repetition_penalty=column(np.float32, 1, lambda r: r.params.repetition_penalty),
        presence_penalty=column(np.float32, 0, lambda r: r.params.presence_penalty),
        frequency_penalty=column(np.float32, 0, lambda r: r.params.frequency_penalty),
        output_start=column(np.int32, 0, lambda r: r.prompt_len),
        history=history,
        bias_ids=bias_ids,
        bias_values=bias_values,
        mask=mask,
    )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Nothing. Raises `RequestError` for an id that the model does not have."""
    given = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "bad_words": [token for word in params.bad_words if isinstance(word, tuple) for token in word],
    }
    for name, ids in given.items():
        for token in ids:
            if token >= vocab_size:
                raise RequestError(
                    f"{name} names the token id {token}, which is not below the vocabulary's {vocab_size}; leave it "
                    "out.",
                    name,
                )


def _columns(rows: Sequence[SamplingRow | None]) -> Callable:
    def column(dtype, empty, value_of):
        return np.asarray([empty if row is None else value_of(row) for row in rows], dtype)

    return column
