# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek-V3 2024; Qwen3-Next 2025): drafts by the head that a model was trained with."""

from dataclasses import dataclass

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.chain import Chain, chain_carried, chain_states, draft, take_in
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool


@dataclass(frozen=True)
class Mtp(AbstractProposer):
    """Drafts of a head that reads the target's final rows; `chain.head` is an `MtpConfig`."""

    chain: Chain

    def layer_states(self, formats: StateFormats) -> tuple:
        """Those of the head's layer."""
        return chain_states(self.chain, formats)

    def carried(self, config: ModelConfig) -> tuple[CarrySpec, ...]:
        """Features of the last tokens."""
        return chain_carried(self.chain, config)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool with an entry of each token."""
        return take_in(self.chain, model, params, pool, batch, hidden, captured)

    def propose(
        self, model: Model, params: DecoderParams, pool: Pool, state: SequenceState, limits, wish: Wish
    ) -> tuple[Drafts, Pool]:
        """A chain of drafts."""
        return draft(self.chain, model, params, pool, state, limits, wish)
