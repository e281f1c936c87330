# SPDX-License-Identifier: Apache-2.0
"""A draft model some of whose layers keep recurrent state (Mamba-2, Gated DeltaNet and hybrids with them).

What its passes do to that state cannot be taken back, so that they advance a copy of it (see `passes`). The state
itself goes along with the target: the draft model runs every step that the target runs, drafts too, of which it keeps
what the target's own recurrent layers would keep, the inputs that wait for their verdict. That is one pass more a step
than a draft model takes that only attends to its past, and none of its tokens is ever missing.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from jaxtyping import Array, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model, layer_states
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.passes import drafted_in_turn, drafter_behind
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool

POSITIONS = "recurrent_draft.positions"


@dataclass(frozen=True)
class RecurrentDraftModel(AbstractProposer):
    """Drafts with the model of `config`, whose params are `DecoderParams.drafter`; `draft_model` checks it."""

    config: ModelConfig

    def layer_states(self, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
        """What the draft model's layers keep."""
        return layer_states(self.config, formats)

    def carried(self, config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
        """How many tokens of each sequence the draft model's state has taken in: `Pool.positions` has moved on to where
        the target's stands by the time that the draft model runs the same step."""
        return (CarrySpec(POSITIONS, (), "int32"),)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool after the draft model ran what the target has run."""
        own = pool.replace(positions=pool.carry[POSITIONS])
        _, own = drafter_behind(model, self.config).run(params.drafter, own, batch)
        return own.replace(positions=pool.positions, carry={**pool.carry, POSITIONS: own.positions})

    def propose(
        self,
        model: Model,
        params: DecoderParams,
        pool: Pool,
        state: SequenceState,
        limits: Int[Array, " S"],
        wish: Wish,
    ) -> tuple[Drafts, Pool]:
        """`limits` drafts of each row, in as many passes as the longest has."""
        own = pool.replace(positions=pool.carry[POSITIONS])
        drafter = drafter_behind(model, self.config)
        drafts, own = drafted_in_turn(drafter, params.drafter, own, state, limits, wish)
        return drafts, pool.replace(groups=own.groups)
