# SPDX-License-Identifier: Apache-2.0
"""Self-speculation (Zhang et al. 2023, "Draft & Verify"): the model itself drafts, with some of its layers skipped.

It takes no weights and no memory. The kept layers attend to what the target's own passes left of the past, and what
they write of drafts lies past the length, where the target writes its own over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Array, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.layers.registry import kind_names
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
    """The model itself. Raises `ConfigError` for one none of whose layers can draft."""
    no_directory("self", ask)
    return Opened(self_draft(ask.target, default_layers(ask.target)), ask.num_drafts or DRAFTS)


def self_draft(target: ModelConfig, layers: Sequence[int]) -> SelfDraft:
    """The proposer of these layers. Raises `ConfigError` for those that cannot draft."""
    count, chosen = len(target.layers), tuple(layers)
    fit = attending_layers(target)
    if not fit:
        kinds = " and ".join(kind_names(target.layers[0]))
        raise ConfigError(
            f"proposer='self' drafts with layers that keep no recurrent state, and of the {count} layers each keeps "
            f"some (the first is of {kinds}); choose proposer='ngram', or one with a drafter."
        )
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= count:
        raise ConfigError(f"layers={chosen} are not one or more of 0 to {count - 1} in rising order; name some.")
    for number in chosen:
        if number not in fit:
            kinds = " and ".join(kind_names(target.layers[number]))
            raise ConfigError(
                f"layer {number} of {kinds} keeps recurrent state, which drafts would advance and could not take back; "
                f"keep none but {fit}."
            )
    return SelfDraft(chosen)


def default_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers to keep where nobody says: those without recurrent state, or of a model that has no others all but
    every second one of the middle third.

    The first and the last layers matter most, and neighbours should not go together. Of SmolLM2-135M that leaves 25 of
    30 layers: no choice that was tried paid there, as the policy then finds; larger models skip with less harm.
    """
    fit, count = attending_layers(target), len(target.layers)
    if len(fit) < count:
        return fit
    third = max(1, count // 3)
    skipped = range(third, count - third, 2)
    return tuple(number for number in fit if number not in skipped)


def attending_layers(target: ModelConfig) -> tuple[int, ...]:
    """The numbers of the layers that keep no recurrent state, which may draft."""
    return tuple(number for number, layer in enumerate(target.layers) if not keeps_recurrent_state(layer))
