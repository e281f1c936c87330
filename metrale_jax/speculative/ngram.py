# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup (Saxena 2023; Yang et al. 2023): what followed the same few tokens earlier in the sequence is drafted.

It has no weights, and looks on the device, so that drafting needs no word from the host.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.registry import Ask, Opened, no_directory
from metrale_jax.speculative.rows import token_rows
from metrale_jax.state.pool import TOKENS, CarrySpec, Pool

# Copies are right for long or not at all.
DRAFTS = 7


@dataclass(frozen=True)
class Ngram(AbstractProposer):
    """Drafts by the longest match of up to `longest` last tokens, the latest of several; none below `shortest`.

    A match of `shortest` tokens says little: `first_copy` tokens are copied for it, and twice as many for each token
    more that agrees.
    """

    shortest: int = 2
    longest: int = 6
    first_copy: int = 3

    def carried(self, config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
        """Each sequence's tokens."""
        return (CarrySpec(TOKENS, (config.max_context_tokens,), "int32"),)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool with the step's tokens at their positions. Rejected drafts among them are written over by what
        stands there instead, before they are looked at."""
        known = pool.carry[TOKENS]
        rows = token_rows(batch)
        slots = jnp.where(rows.real, rows.slots, known.shape[0])
        known = known.at[slots, batch.positions].set(batch.tokens, mode="drop")
        return pool.replace(carry={**pool.carry, TOKENS: known})

    def propose(
        self, model: Model, params: DecoderParams, pool: Pool, state: SequenceState, limits, wish: Wish
    ) -> tuple[Drafts, Pool]:
        """Copies of what followed the longest match; fewer than `limits` for a short one, none without one."""
        rows = jnp.arange(limits.shape[0], dtype=jnp.int32)
        known = pool.carry[TOKENS].at[state.recurrent_slot].get(mode="clip")
        known = known.at[rows, state.seq_len].set(state.last_token, mode="drop")
        drafts, matched = copied(known, state.seq_len + 1, wish.num_drafts, self.longest)
        window = self.first_copy * 2 ** jnp.clip(matched - self.shortest, 0, 8)
        lens = jnp.where(matched >= self.shortest, jnp.minimum(limits, window), 0)
        return Drafts(drafts, lens), pool


def copied(
    known: Int[Array, "S C"], lengths: Int[Array, " S"], num_drafts: int, longest: int
) -> tuple[Int[Array, "S J"], Int[Array, " S"]]:
    """What followed the latest of the longest matches of each row's last tokens, and how many of them matched.

    The first `lengths[s]` tokens of a row are known. A match that overlaps the end is a cycle and is gone on with. At
    most `longest` tokens are compared; 0 matched means that the copy is of nothing.
    """
    place = jnp.arange(known.shape[1], dtype=jnp.int32)
    alive = place < lengths[:, None] - 1
    matched = jnp.zeros(known.shape, jnp.int32)
    for back in range(longest):
        wanted = jnp.take_along_axis(known, jnp.maximum(lengths - 1 - back, 0)[:, None], axis=1)
        earlier = jnp.pad(known, ((0, 0), (back, 0)))[:, : known.shape[1]]
        alive = alive & (earlier == wanted) & (place >= back) & (back < lengths[:, None])
        matched += alive.astype(jnp.int32)
    # The longest match, and of those the latest.
    best = jnp.argmax(matched * known.shape[1] + place, axis=1).astype(jnp.int32)
    count = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    period = jnp.maximum(lengths - 1 - best, 1)
    offset = jnp.arange(num_drafts, dtype=jnp.int32)
    source = best[:, None] + 1 + offset % period[:, None]
    return jnp.take_along_axis(known, jnp.minimum(source, known.shape[1] - 1), axis=1), count


def open_proposer(ask: Ask) -> Opened:
    """Prompt lookup, for any model."""
    no_directory("ngram", ask)
    return Opened(Ngram(), ask.num_drafts or DRAFTS)
