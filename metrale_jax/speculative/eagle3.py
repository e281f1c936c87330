# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 (Li et al. 2025): drafts by a head trained on three rows of the target's residual stream."""

from dataclasses import dataclass

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.chain import chain_carried, chain_states, draft, take_in
from metrale_jax.speculative.heads import EagleConfig
from metrale_jax.speculative.opened import opened_head
from metrale_jax.speculative.registry import Ask, Opened
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool


@dataclass(frozen=True)
class Eagle3(AbstractProposer):
    """Drafts of a head that reads three rows of the target's residual stream. `min_confidence`: see `chain.draft`."""

    head: EagleConfig
    min_confidence: float = 0.0

    @property
    def captures(self) -> tuple[int, ...]:
        """Where the head reads."""
        return self.head.capture

    def layer_states(self, formats: StateFormats) -> tuple:
        """Those of the head's layer."""
        return chain_states(self.head, formats)

    def carried(self, config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
        """Features of the last tokens."""
        return chain_carried(config, num_drafts)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool with an entry of each token."""
        return take_in(self.head, model, params, pool, batch, hidden, captured)

    def propose(
        self, model: Model, params: DecoderParams, pool: Pool, state: SequenceState, limits, wish: Wish
    ) -> tuple[Drafts, Pool]:
        """A chain of drafts."""
        return draft(self.head, self.min_confidence, model, params, pool, state, limits, wish)


def open_proposer(ask: Ask) -> Opened:
    """The head in the directory, trained here or published."""
    return opened_head("eagle3", ask, Eagle3)
