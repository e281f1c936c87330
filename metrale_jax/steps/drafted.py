# SPDX-License-Identifier: Apache-2.0
"""`speculate` in two halves, as the host loop runs it: over the layers, drafts and all, and from hidden rows to tokens.

Nothing of one half waits for the host but where a rule of the host's (a grammar) has to see the drafts first.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import Drafts
from metrale_jax.state.pool import Pool
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import DecodeRows, DrawRows
from metrale_jax.steps.speculate import draft_and_run
from metrale_jax.steps.verify import judged


def advance_drafts(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    last_tokens: Int[Array, " U"],
    decoding: DecodeRows,
    limits: Int[Array, " S"],
    num_drafts: int,
) -> tuple[Pool, Float[Array, "R D"], Drafts]:
    """The pool, the hidden rows `[S (J + 1), D]` of each sequence's last token and its drafts, and the drafts, of which
    a row has at most `limits`.

    `last_tokens` holds each slot's last drawn token; `decoding.state.sampling` says how the drafts are drawn.
    """
    state = decoding.state.replace(last_token=last_tokens.at[decoding.slots].get(mode="clip"))
    return draft_and_run(model, params, pool, state, limits, num_drafts)


def judge(
    model: Model,
    params: DecoderParams,
    last_tokens: Int[Array, " U"],
    hidden: Float[Array, "R D"],
    drafts: Drafts,
    rows: DrawRows,
    num_logprobs: int = 0,
) -> tuple[Int[Array, " U"], StepOutput]:
    """Every slot's last token after its drafts were judged, and what was drawn. `rows.positions` are those of each
    row's first token to be drawn, 0 for padding. Of `params` only the embedding and head are read."""
    nothing: Any = ()
    state = SequenceState(
        seq_len=jnp.where(rows.slots > 0, rows.positions - 1, 0),
        prompt_len=nothing,
        last_token=last_tokens.at[rows.slots].get(mode="clip"),
        block_tables=(),
        recurrent_slot=nothing,
        adapter_slot=nothing,
        sampling=rows.sampling,
    )
    state, out = judged(model, params, state, hidden, drafts, num_logprobs)
    last = last_tokens.at[rows.slots].set(state.last_token, mode="promise_in_bounds")
    return last.at[0].set(0), out
