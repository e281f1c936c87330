# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as it began (Leviathan et al. 2022; Chen et al. 2023): a smaller model of the same vocabulary
drafts.

Its layers stand after the target's in the target's pool. Prompts and single tokens are run by both models. Of a run of
drafts the drafter has written all but the last one's keys and values while it drafted: its next first pass makes that
good, where the draft stood. Until then the last token before `seq_len` may be missing to whoever shares the blocks,
which costs drafts and no answer. A draft model that keeps recurrent state is kept in step otherwise: see
`recurrent_draft`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.batch import TokenBatch, concatenate
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, layer_states
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.passes import drafted_in_turn, drafter_behind, keeps_recurrent_state
from metrale_jax.speculative.recurrent_draft import RecurrentDraftModel
from metrale_jax.speculative.registry import Ask, Opened, wanted_directory
from metrale_jax.speculative.rows import segment_batches
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool
from metrale_jax.steps.batches import uniform_batch

DRAFTS = 4
MISSING = "draft_model.missing"


@dataclass(frozen=True)
class DraftModel(AbstractProposer):
    """Drafts with the model of `config`, which only attends to its past and whose params are `DecoderParams.drafter`;
    `draft_model` checks it."""

    config: ModelConfig
    looks_back: ClassVar[int] = 1

    def layer_states(self, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
        """What the draft model's layers keep."""
        return layer_states(self.config, formats)

    def carried(self, config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
        """Of each sequence the position of the last draft, which the draft model has not run, and the draft. Position 0
        is for none."""
        return (CarrySpec(MISSING, (2,), "int32"),)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool after the draft model ran what is sure to stand: all but rows with drafts, which it ran when it made
        them."""
        missing = pool.carry[MISSING]
        parts, slots = [], []
        for part in segment_batches(batch):
            (segment,) = part.segments
            if segment.uniform and segment.state.max_query_len > 1:
                continue
            state = single_tokens(part) if segment.uniform else None
            parts.append(part if state is None else caught_up(missing, state, model.layout.block_size).batch)
            slots.append(segment.state.slots)
        if not parts:
            return pool
        _, pool = drafter_behind(model, self.config).run(params.drafter, pool, reduce(concatenate, parts))
        for own in slots:
            missing = missing.at[own].set(0, mode="promise_in_bounds")
        return pool.replace(carry={**pool.carry, MISSING: missing})

    def propose(
        self,
        model: Model,
        params: DecoderParams,
        pool: Pool,
        state: SequenceState,
        limits: Int[Array, " S"],
        wish: Wish,
    ) -> tuple[Drafts, Pool]:
        """`limits` drafts of each row, in as many passes as the longest has; the first is over a token that is missing
        too."""
        if not wish.num_drafts:
            # A run of single tokens follows, which is observed.
            return Drafts(jnp.zeros((limits.shape[0], 0), jnp.int32), limits), pool
        drafter, weights = drafter_behind(model, self.config), params.drafter
        rows = caught_up(pool.carry[MISSING], state, model.layout.block_size)
        x, pool = drafter.run(weights, pool, rows.batch)
        plain = state.replace(sampling=state.sampling.replace(extras=()))
        first = drafter.guess(weights, x, rows.last, plain, state.seq_len + 1)
        drafts, pool = drafted_in_turn(drafter, weights, pool, state, limits, wish, first)
        # The first pass ran the last token. Each draft but the last was run by the pass after it.
        last = jnp.take_along_axis(drafts.tokens, jnp.maximum(limits - 1, 0)[:, None], axis=1)[:, 0]
        missing = jnp.stack([jnp.where(limits > 0, state.seq_len + limits, 0), last], axis=1)
        slots = jnp.where(state.seq_len > 0, state.recurrent_slot, 0)
        carry = pool.carry[MISSING].at[slots].set(missing, mode="promise_in_bounds")
        return drafts, pool.replace(carry={**pool.carry, MISSING: carry})


class CaughtUp(NamedTuple):
    """Each row's last token, after the one before it where that is missing, and the rows of the `batch` at which the
    `last` tokens are."""

    batch: TokenBatch
    last: Int[Array, " S"]


def caught_up(missing: Int[Array, "U two"], state: SequenceState, block_size: int) -> CaughtUp:
    """Rows of two tokens, of which most have one."""
    position, token = (missing[:, column].at[state.recurrent_slot].get(mode="clip") for column in (0, 1))
    # The first token of a sequence is never a draft.
    back = ((position == state.seq_len - 1) & (position > 0)).astype(jnp.int32)
    here = state.replace(seq_len=state.seq_len - back, last_token=jnp.where(back > 0, token, state.last_token))
    batch = uniform_batch(here, state.last_token[:, None], back, block_size)
    return CaughtUp(batch, 2 * jnp.arange(back.shape[0], dtype=jnp.int32) + back)


def single_tokens(batch: TokenBatch) -> SequenceState:
    """The sequences of a batch of one token each, as far as `caught_up` looks at them."""
    (segment,) = batch.segments
    nothing: Any = ()
    return SequenceState(
        seq_len=segment.state.starts,
        # It has been run, so that it governs no length any more.
        prompt_len=jnp.zeros_like(segment.state.starts),
        last_token=batch.tokens,
        block_tables=tuple(rows.block_tables for rows in segment.rows),
        recurrent_slot=segment.state.slots,
        adapter_slot=nothing,
        sampling=nothing,
    )


def open_proposer(ask: Ask) -> Opened:
    """The model in the directory."""
    wanted_directory("model", ask, "a smaller model of the same tokens")
    config, specs, source, ignored = ask.model()
    return Opened(draft_model(ask.target, config), ask.num_drafts or DRAFTS, specs, source, ignored)


def draft_model(target: ModelConfig, draft: ModelConfig) -> AbstractProposer:
    """The proposer of another model. Raises `ConfigError` for one that cannot draft for the target."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"a {draft.family} draft model of vocab_size={draft.vocab_size} cannot draft for a {target.family} model "
            f"of vocab_size={target.vocab_size}, whose tokens are others; use a draft model with the target's tokens."
        )
    return RecurrentDraftModel(draft) if any(map(keeps_recurrent_state, draft.layers)) else DraftModel(draft)
