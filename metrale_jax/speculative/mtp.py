# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek-V3 2024; Qwen3-Next 2025): drafts by the head that a model was trained with."""

from dataclasses import dataclass

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.next_layer import NextLayer
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.models.registry import family_for
from metrale_jax.speculative.chain import chain_carried, chain_states, draft, take_in
from metrale_jax.speculative.heads import HeadParams, MtpConfig, head_config
from metrale_jax.speculative.opened import DRAFTS, opened_head
from metrale_jax.speculative.registry import Ask, Opened
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool


@dataclass(frozen=True)
class Mtp(AbstractProposer):
    """Drafts of a head that reads the target's final rows. `min_confidence`: see `chain.draft`."""

    head: MtpConfig
    min_confidence: float = 0.0

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
    """The head in the directory, or without one, that of the target's own checkpoint.

    A checkpoint that was trained with several such layers drafts with the first, over and over.
    """
    if ask.directory is not None:
        return opened_head("mtp", ask, Mtp)
    found = _own_layer(ask)
    specs = HeadParams(found.embed_norm, found.hidden_norm, found.fc, found.layer, found.final_norm)
    proposer = Mtp(head_config("mtp", ask.target, found.config, 0), ask.confidence)
    return Opened(proposer, ask.num_drafts or DRAFTS, specs, heeds=("confidence",))


def _own_layer(ask: Ask) -> NextLayer:
    (architecture,) = ask.values["architectures"]
    family = family_for(architecture)
    raw = RawConfig(ask.values, family.defaults, "the model's config")
    found = None if family.next_layer is None else family.next_layer(ask.target, raw)
    if found is None:
        raise ConfigError(
            f"proposer='mtp' needs a layer that drafts, and the model's checkpoint ({architecture}) has none; give a "
            "head as drafter (metrale-jax train-drafter makes one), or choose proposer='ngram'."
        )
    return found
