# SPDX-License-Identifier: Apache-2.0
"""Drafts made one after the other by a decoder: passes over one token a row, each token drawn as the target will draw
its own.

A pass writes what its layers keep at the token's position. Rows that have reached their limit are padding: they read
and write the null block. Recurrent state cannot be written over like that: the passes advance a copy of it, which is
dropped after the last of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig, ModelConfig
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
from metrale_jax.state.positions import advanced, located
from metrale_jax.state.registry import BY_SLOT, OF_STORAGE
from metrale_jax.steps.batches import uniform_batch


@dataclass(frozen=True)
class Drafter:
    """A decoder that drafts in another's pool: a `model` whose config is its own and whose layout is the pool's, in
    which its layers have these `numbers`."""

    model: Model
    numbers: tuple[int, ...]

    def run(self, weights: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
        """Final hidden rows, and the pool after the layers took the batch in. Where they keep states in slots, the
        pool's positions are to be those of these layers."""
        config = self.model.config
        if self.slot_groups:
            batch = located(batch, pool.positions, self.model.layout.num_pending)
        stack = Stack(config.layers, self.numbers, config.norm_eps, config.residual_scale)
        x = embedded(self.model, weights, batch.tokens)
        x, groups = run_stack(self.model, stack, weights.layers, x, pool, batch)
        pool = with_groups(pool, groups)
        if self.slot_groups:
            pool = pool.replace(positions=advanced(pool.positions, batch))
        return rms_norm(x, weights.final_norm, config.norm_eps), pool

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
        """The groups of the pool that its layers write to by block."""
        return tuple(group for group in self._written if group < len(self.model.layout.groups))

    @property
    def slot_groups(self) -> tuple[int, ...]:
        """Those that they write to by slot, counted on from the others."""
        return tuple(group for group in self._written if group >= len(self.model.layout.groups))

    def layers_of(self, group: int) -> tuple[int, ...]:
        """The indices in a group of what its layers keep there, in order."""
        placed = (self.model.layout.placement[number] for number in self.numbers)
        return tuple(index for places in placed for owner, index in places if owner == group)

    @property
    def _written(self) -> tuple[int, ...]:
        placed = (self.model.layout.placement[number] for number in self.numbers)
        return tuple(sorted({group for places in placed for group, _ in places}))


def drafter_behind(model: Model, config: ModelConfig) -> Drafter:
    """The drafter of `config`, whose layers are numbered on from the target's."""
    begin = len(model.config.layers)
    numbers = tuple(range(begin, begin + len(config.layers)))
    return Drafter(replace(model, config=config, proposer=None), numbers)


@dataclass(frozen=True)
class Turn:
    """One draft for each row, as a function of its static facts."""

    drafter: Drafter

    def __call__(self, weights: DecoderParams, pool: Pool, state: SequenceState):
        """Tokens and scores after each row's last token, and the `pool`, of which no more is asked than the drafter's
        groups, after it was run. Rows of length 0 are padding."""
        drafter, num_rows = self.drafter, state.seq_len.shape[0]
        nothing = jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros_like(state.seq_len)
        batch = uniform_batch(state, *nothing, drafter.model.layout.block_size)
        x, pool = drafter.run(weights, pool, batch)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        token, scores = drafter.guess(weights, x, rows, state, state.seq_len + 1)
        return token, scores, pool


def drafted_in_turn(
    drafter: Drafter,
    weights: DecoderParams,
    pool: Pool,
    state: SequenceState,
    limits: Int[Array, " S"],
    wish: Wish,
    first: tuple = (),
) -> tuple[Drafts, Pool]:
    """`limits[s]` drafts of each row, and the pool after the passes that made them, whose slots stay as they were.

    `first` is what the first draft is and was drawn from, where a pass over `last_token` made it already. Where the
    drafter keeps states in slots, the pool's positions are to be those of its layers.
    """
    refuse_sharing(drafter.model)
    drafter, own, state = apart(drafter, pool, state.replace(sampling=state.sampling.replace(extras=())))
    turn = outlined(Turn(drafter), drafter.model.platform)
    made = [first] if first else []
    for number in range(len(made), wish.num_drafts):
        token = made[-1][0] if made else state.last_token
        seq_len = jnp.where((state.seq_len > 0) & (number < limits), state.seq_len + number, 0)
        token, scores, own = turn(weights, own, state.replace(seq_len=seq_len, last_token=token))
        made.append((token, scores))
    groups = list(pool.groups)
    for group in drafter.groups:
        groups[group] = own.groups[group]
    pool = pool.replace(groups=tuple(groups))
    if not made:
        return Drafts(jnp.zeros((limits.shape[0], 0), jnp.int32), limits), pool
    tokens, scores = (jnp.stack(column, axis=1) for column in zip(*made, strict=True))
    return Drafts(tokens, limits, scores if wish.scores else ()), pool


def apart(drafter: Drafter, pool: Pool, state: SequenceState) -> tuple[Drafter, Pool, SequenceState]:
    """The drafter over a pool of its own groups alone, in which row s has slot s + 1: what is in its slot, pending rows
    too, is there as a copy. Blocks are the pool's own."""
    layout = drafter.model.layout
    groups = tuple(kv if group in drafter.groups else () for group, kv in enumerate(pool.groups))
    if not drafter.slot_groups:
        return drafter, Pool(groups), state
    slots = jnp.concatenate([jnp.zeros(1, jnp.int32), state.recurrent_slot])
    indices = {group: drafter.layers_of(group) for group in drafter.slot_groups}
    copies: list[Any] = [()] * len(pool.slot_groups)
    for group, layers in indices.items():
        kept = pool.slot_groups[group - len(groups)]
        copies[group - len(groups)] = OF_STORAGE[type(kept)].read_layers(kept, layers, slots)
    own = Pool(groups, tuple(copies), pool.positions.at[slots].get(mode="clip"))
    placement = tuple(
        tuple(
            (group, indices[group].index(index)) if number in drafter.numbers and group in indices else (group, index)
            for group, index in places
        )
        for number, places in enumerate(layout.placement)
    )
    model = replace(drafter.model, layout=replace(layout, placement=placement))
    rows = jnp.arange(1, len(slots), dtype=jnp.int32)
    return replace(drafter, model=model), own, state.replace(recurrent_slot=rows)


def refuse_sharing(model: Model) -> None:
    """Nothing. Raises `ConfigError` for a model that several devices share: what drafts in its pool runs on one."""
    if model.sharing is not None:
        raise ConfigError(
            f"drafts of a decoder are made on 1 device, and {model.sharing.mesh.size} share the model; give "
            "tensor_parallel=1, or choose proposer='ngram'."
        )


def keeps_recurrent_state(layer: LayerConfig) -> bool:
    """Whether what the layer keeps of a sequence lies in a slot, where a pass advances it for good."""
    formats = StateFormats("float32")
    return any(type(MIXERS[type(mixer)].state(mixer, formats)) in BY_SLOT for mixer in layer.mixers)
