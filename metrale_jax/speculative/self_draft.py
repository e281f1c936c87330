# SPDX-License-Identifier: Apache-2.0
"""Self-speculation (Zhang et al. 2023, "Draft & Verify"): the model itself drafts, with some of its layers skipped.

It takes no weights and no memory. The kept layers go by what the target's own passes left of the past. What they write
of drafts by block lies past the length, where the target writes its own over it; recurrent state is advanced in a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Array, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.speculative.passes import Drafter, drafted_in_turn, keeps_recurrent_state
from metrale_jax.speculative.registry import Ask, Opened, no_directory
from metrale_jax.state.pool import Pool

# Passes that skip little cost nearly what the target's do: more drafts than these are seldom worth theirs.
DRAFTS = 3


@dataclass(frozen=True)
class SelfDraft(AbstractProposer):
    """Drafts with the `layers` of these numbers, in rising order; `self_draft` checks them."""

    layers: tuple[int, ...]
    one_device: ClassVar[bool] = True

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool as it is: the target's layers are the drafter's."""
        return pool

    def propose(
        self,
        model: Model,
        params: DecoderParams,
        pool: Pool,
        state: SequenceState,
        limits: Int[Array, " S"],
        wish: Wish,
    ) -> tuple[Drafts, Pool]:
        """`limits` drafts of each row, in as many passes over the kept layers as the longest has."""
        kept = (tuple(layers[number] for number in self.layers) for layers in (model.config.layers, params.layers))
        layers, weights = kept
        drafter = Drafter(replace(model, config=replace(model.config, layers=layers), proposer=None), self.layers)
        return drafted_in_turn(drafter, params.replace(layers=weights, drafter=()), pool, state, limits, wish)


def open_proposer(ask: Ask) -> Opened:
    """The model itself."""
    no_directory("self", ask)
    layers = default_layers(ask.target) if ask.layers is None else ask.layers
    return Opened(self_draft(ask.target, layers), ask.num_drafts or DRAFTS, heeds=("layers",))


def self_draft(target: ModelConfig, layers: Sequence[int]) -> SelfDraft:
    """The proposer of these layers. Raises `ConfigError` for those that the model lacks."""
    count, chosen = len(target.layers), tuple(layers)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= count:
        raise ConfigError(
            f"the layers {chosen} to draft with are not one or more of 0 to {count - 1} in rising order; name some."
        )
    return SelfDraft(chosen)


def default_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers to keep where nobody says: those without recurrent state, which cost least to draft with, or of a
    model all of whose layers are of one sort in that all but every second one of the middle third.

    The first and the last layers matter most, and neighbours should not go together. Of SmolLM2-135M that leaves 25 of
    30 layers: no choice that was tried paid there, as the policy then finds; larger models skip with less harm.
    """
    count = len(target.layers)
    attending = tuple(number for number, layer in enumerate(target.layers) if not keeps_recurrent_state(layer))
    if 0 < len(attending) < count:
        return attending
    third = max(1, count // 3)
    skipped = range(third, count - third, 2)
    return tuple(number for number in range(count) if number not in skipped)
