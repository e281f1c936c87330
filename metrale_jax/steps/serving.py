# SPDX-License-Identifier: Apache-2.0
"""A step in two halves, as the host loop runs it: over the layers, and from hidden rows to tokens.

The first half costs nearly all of a step's compile time and has one form a shape; the second is small and has the
variants (penalties, log-probabilities). Between their dispatches the host may still work out what a token is allowed
to be. `prefill`, `decode`, `verify` and `mixed` are the same functions joined.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import concatenate
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.sampling.history import remember
from metrale_jax.sampling.rules import ruled_logits
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import ragged_batch, uniform_batch
from metrale_jax.steps.outcome import StepOutput, sample_rows, standing
from metrale_jax.steps.target import run_target


@struct.dataclass
class DecodeRows:
    """Sequences that run their last token: a `state` whose `last_token` is looked up by `slots [S]`."""

    state: SequenceState
    slots: Any


@struct.dataclass
class ChunkRows:
    """Sequences that take in more of their prompts: `tokens [T]` laid end to end, `lengths [S]` of each."""

    state: SequenceState
    tokens: Any
    lengths: Any


@struct.dataclass
class DrawRows:
    """Rows that draw a token: int32 `slots [R]` whose last token it becomes, the `positions [R]` where it will stand,
    and the `SamplingState` to draw by. Where `pending [R]`, the token before it is the slot's last one and not in the
    history yet. Slot 0 is padding."""

    slots: Any
    positions: Any
    pending: Any
    sampling: Any


def advance(
    model: Model, params: DecoderParams, pool: Pool, last_tokens: Int[Array, " U"], decoding: Any, chunks: Any
) -> tuple[Pool, Float[Array, "Q D"], Any]:
    """The pool, and the hidden rows that tokens can be drawn from: one for each decoding sequence, then one for the end
    of each chunk. Last, the hidden rows `[T, D]` of all the chunks' tokens.

    `decoding` are `DecodeRows` or `()`, `chunks` are `ChunkRows` or `()`, not both empty. `last_tokens` holds each
    slot's last drawn token.
    """
    if isinstance(chunks, tuple):
        hidden, pool = run_target(model, params, pool, _decode_batch(model, last_tokens, decoding))
        return pool, hidden, ()
    filling = ragged_batch(chunks.state, chunks.tokens, chunks.lengths, model.layout.block_size)
    ends = jnp.maximum(jnp.cumsum(chunks.lengths) - 1, 0)
    if isinstance(decoding, tuple):
        hidden, pool = run_target(model, params, pool, filling)
        return pool, hidden.at[ends].get(mode="clip"), hidden
    batch = concatenate(_decode_batch(model, last_tokens, decoding), filling)
    hidden, pool = run_target(model, params, pool, batch)
    num_decoding = decoding.slots.shape[0]
    rows = jnp.concatenate([jnp.arange(num_decoding, dtype=jnp.int32), num_decoding + ends])
    return pool, hidden.at[rows].get(mode="clip"), hidden[num_decoding:]


def _decode_batch(model: Model, last_tokens, decoding: DecodeRows):
    state = decoding.state.replace(last_token=last_tokens.at[decoding.slots].get(mode="clip"))
    num_sequences = decoding.slots.shape[0]
    none = jnp.zeros((num_sequences, 0), jnp.int32)
    return uniform_batch(state, none, jnp.zeros(num_sequences, jnp.int32), model.layout.block_size)


@struct.dataclass
class Candidates:
    """For each row the `k` likeliest tokens under its rules: int32 `ids [R, k]`, float32 `logprobs [R, k]`, and bool
    `finite [R]`, false where a logit was not a finite number."""

    ids: Any
    logprobs: Any
    finite: Any


def candidates(
    model: Model, params: DecoderParams, hidden: Float[Array, "R D"], rows: DrawRows, num_top: int
) -> Candidates:
    """What a beam search chooses from: log-softmax of plain logits, rules applied after it as transformers has it."""
    logits = head_logits(model, params, hidden, jnp.arange(hidden.shape[0], dtype=jnp.int32))
    ruled = ruled_logits(jax.nn.log_softmax(logits, axis=-1), rows.sampling, rows.positions[:, None])
    logprobs, ids = jax.lax.top_k(ruled, num_top)
    return Candidates(ids.astype(jnp.int32), logprobs, jnp.all(jnp.isfinite(logits), axis=-1))


def pick_rows(hidden: Float[Array, "Q D"], picks: Int[Array, " R"]) -> Float[Array, "R D"]:
    """Rows `picks` of `hidden`: the sequences that draw, one that was forked more than once."""
    return hidden.at[picks].get(mode="clip")


def keep_rows(kept: Float[Array, "U D"], hidden: Float[Array, "Q D"], places: Int[Array, " n"]) -> Float[Array, "U D"]:
    """`kept` with the last `n` rows of `hidden` at `places`; place 0 is for those that are not kept."""
    return kept.at[places].set(hidden[-places.shape[0] :], mode="promise_in_bounds")


def finish(
    model: Model,
    params: DecoderParams,
    last_tokens: Int[Array, " U"],
    hidden: Float[Array, "R D"],
    rows: DrawRows,
    num_logprobs: int = 0,
) -> tuple[Int[Array, " U"], StepOutput]:
    """Every slot's last token after this draw, and what was drawn. Of `params` only the embedding and head are read."""
    logits = head_logits(model, params, hidden, jnp.arange(hidden.shape[0], dtype=jnp.int32))
    before = jnp.where(rows.pending, rows.positions - 1, -1)
    extras = remember(rows.sampling.extras, before[:, None], last_tokens.at[rows.slots, None].get(mode="clip"))
    sampling = rows.sampling.replace(extras=extras)
    drawn = sample_rows(logits, sampling, rows.positions[:, None], num_logprobs)
    out = standing(drawn, jnp.ones_like(rows.positions))
    last = last_tokens.at[rows.slots].set(out.tokens[:, 0], mode="promise_in_bounds")
    return last.at[0].set(0), out


def put_tokens(last_tokens: Int[Array, " U"], slots: Int[Array, " n"], tokens: Int[Array, " n"]) -> Int[Array, " U"]:
    """`last_tokens` with those of `slots` replaced by the host's; slot 0 is padding."""
    return last_tokens.at[slots].set(tokens, mode="promise_in_bounds")
