# SPDX-License-Identifier: Apache-2.0
"""One sequence, start to finish, with nothing optional: no batching, no chunks, no look-ahead.

The first thing to read, where a notebook starts, and the oracle: whatever the engine does, it must give these tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np

from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import PoolLayout, make_pool, zeros
from metrale_jax.steps.build import Steps
from pallas_kernels.shapes import ceil_div


def generate_tokens(
    steps: Steps,
    params: DecoderParams,
    prompt: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    fill: Callable = zeros,
) -> list[int]:
    """Token ids of the answer to `prompt`, a stop id included if one ended it.

    `steps` are a model's compiled steps. `sampling.max_tokens` bounds the answer; text-level stops do not apply here.
    """
    config, layout = steps.model.config, steps.model.layout
    limit = config.max_context_tokens - len(prompt)
    max_tokens = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    width = ceil_div(len(prompt) + max_tokens, layout.block_size)
    pool = make_pool(layout, (width + 1,) * len(layout.groups), fill)
    state = first_state(layout, len(prompt), width, sampling, seed, stop_ids, config.vocab_size)
    pool, state, out = steps.run("prefill", params, pool, state, _ids(prompt), _ids([len(prompt)]))
    answer = [int(out.tokens[0, 0])]
    while answer[-1] not in stop_ids and len(answer) < max_tokens:
        length = len(prompt) + len(answer)
        if config.recompute_len and length == config.recompute_len + 1 and len(prompt) <= config.recompute_len:
            # The past is run again under the rotary frequencies of a long sequence.
            state = first_state(layout, length, width, sampling, seed, stop_ids, config.vocab_size)
            state = state.replace(sampling=state.sampling.replace(min_len=_min_len(len(prompt), sampling)))
            tokens = _ids([*prompt, *answer])
            pool, state, out = steps.run("prefill", params, pool, state, tokens, _ids([length]))
        else:
            pool, state, out = steps.run("decode", params, pool, state)
        answer.append(int(out.tokens[0, 0]))
    return answer


def first_state(
    layout: PoolLayout,
    prompt_len: int,
    table_width: int,
    sampling: SamplingParams,
    seed: int,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> SequenceState:
    """A batch of one sequence that has run nothing yet and holds blocks 1 to `table_width` of every group."""
    zero = _ids([0])
    return SequenceState(
        seq_len=zero,
        prompt_len=_ids([prompt_len]),
        last_token=zero,
        block_tables=tuple(np.arange(1, table_width + 1, dtype=np.int32)[None] for _ in layout.groups),
        recurrent_slot=zero,
        adapter_slot=zero,
        sampling=SamplingState(
            temperature=np.asarray([sampling.temperature], np.float32),
            top_k=_ids([max(0, min(sampling.top_k, vocab_size))]),
            top_p=np.asarray([sampling.top_p], np.float32),
            min_p=np.asarray([sampling.min_p], np.float32),
            seed=np.asarray([seed], np.uint32),
            min_len=_min_len(prompt_len, sampling),
            stop_ids=_ids(stop_ids or [vocab_size])[None],
        ),
    )


def _min_len(prompt_len: int, sampling: SamplingParams) -> np.ndarray:
    return _ids([prompt_len + sampling.min_tokens if sampling.min_tokens else 0])


def _ids(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)
