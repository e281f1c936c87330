# SPDX-License-Identifier: Apache-2.0
"""Drafts made one after the other by a decoder: passes over one token a row, each token drawn as the target will draw
its own.

A pass writes what its layers keep at the token's position. Rows that have reached their limit are padding: they read
and write the null block.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.registry import MIXERS
from metrale_jax.models.decoder import DecoderParams, Model, embedded, head_logits, with_groups
from metrale_jax.models.outline import outlined
from metrale_jax.models.proposer import Drafts, Wish
from metrale_jax.models.stack import Stack, run_stack
from metrale_jax.sampling.rules import ruled_logits
from metrale_jax.sampling.sample import draw
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import Pool
from metrale_jax.state.registry import BY_SLOT
from metrale_jax.steps.batches import uniform_batch


@dataclass(frozen=True)
class Drafter:
    """A decoder that drafts in another's pool: a `model` whose config is its own and whose layout is the pool's, in
    which its layers have these `numbers`. None of them keeps recurrent state."""

    model: Model
    numbers: tuple[int, ...]

    def run(self, weights: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
        """Final hidden rows, and the pool with the layers' keys and values."""
        config = self.model.config
        stack = Stack(config.layers, self.numbers, config.norm_eps, config.residual_scale)
        x = embedded(self.model, weights, batch.tokens)
        x, groups = run_stack(self.model, stack, weights.layers, x, pool, batch)
        return rms_norm(x, weights.final_norm, config.norm_eps), with_groups(pool, groups)

    def guess(
        self, weights: DecoderParams, x: Float[Array, "T D"], rows: Int[Array, " S"], state: SequenceState, positions
    ) -> tuple[Int[Array, " S"], Float[Array, "S V"]]:
        """The tokens at `positions [S]` that the hidden `rows` say, and the logits they were drawn from.

        Of the rules only that against early stops applies: others look back on what they would have to be told.
        """
        logits = head_logits(self.model, weights, x, rows)
        ruled = ruled_logits(logits, state.sampling, positions[:, None])
        return draw(ruled, state.sampling, positions), ruled

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups of the pool that its layers write to."""
        return tuple(sorted({group for number in self.numbers for group, _ in self.model.layout.placement[number]}))


@dataclass(frozen=True)
class Turn:
    """One draft for each row, as a function of its static facts."""

    drafter: Drafter

    def __call__(self, weights: DecoderParams, storages: tuple, state: SequenceState):
        """Tokens and scores after each row's last token, and the drafter's groups' `storages` after it was run. Rows of
        length 0 are padding."""
        drafter, num_rows = self.drafter, state.seq_len.shape[0]
        groups: list[Any] = [()] * len(drafter.model.layout.groups)
        for group, storage in zip(drafter.groups, storages, strict=True):
            groups[group] = storage
        nothing = jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros_like(state.seq_len)
        batch = uniform_batch(state, *nothing, drafter.model.layout.block_size)
        x, pool = drafter.run(weights, Pool(tuple(groups)), batch)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        token, scores = drafter.guess(weights, x, rows, state, state.seq_len + 1)
        return token, scores, tuple(pool.groups[group] for group in drafter.groups)


def drafted_in_turn(
    drafter: Drafter,
    weights: DecoderParams,
    pool: Pool,
    state: SequenceState,
    limits: Int[Array, " S"],
    wish: Wish,
    first: tuple = (),
) -> tuple[Drafts, Pool]:
    """`limits[s]` drafts of each row, and the pool after the passes that made them.

    `first` is what the first draft is and was drawn from, where a pass over `last_token` made it already.
    """
    refuse_sharing(drafter.model)
    state = state.replace(sampling=state.sampling.replace(extras=()))
    turn = outlined(Turn(drafter), drafter.model.platform)
    storages, made = tuple(pool.groups[group] for group in drafter.groups), [first] if first else []
    for number in range(len(made), wish.num_drafts):
        token = made[-1][0] if made else state.last_token
        seq_len = jnp.where((state.seq_len > 0) & (number < limits), state.seq_len + number, 0)
        token, scores, storages = turn(weights, storages, state.replace(seq_len=seq_len, last_token=token))
        made.append((token, scores))
    groups = list(pool.groups)
    for group, storage in zip(drafter.groups, storages, strict=True):
        groups[group] = storage
    pool = pool.replace(groups=tuple(groups))
    if not made:
        return Drafts(jnp.zeros((limits.shape[0], 0), jnp.int32), limits), pool
    tokens, scores = (jnp.stack(column, axis=1) for column in zip(*made, strict=True))
    return Drafts(tokens, limits, scores if wish.scores else ()), pool


def refuse_sharing(model: Model) -> None:
    """Nothing. Raises `ConfigError` for a model that several devices share: what drafts in its pool runs on one."""
    if model.sharing is not None:
        raise ConfigError(
            f"drafts of a decoder are made on 1 device, and {model.sharing.mesh.size} share the model; give "
            "tensor_parallel=1, or choose proposer='ngram'."
        )


def keeps_recurrent_state(layer: LayerConfig) -> bool:
    """Whether what the layer keeps of a sequence lies in a slot, where drafts would advance it for good."""
    formats = StateFormats("float32")
    return any(type(MIXERS[type(mixer)].state(mixer, formats)) in BY_SLOT for mixer in layer.mixers)
