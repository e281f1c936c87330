# SPDX-License-Identifier: Apache-2.0
"""Drafting with a head: one token after the other, each entry beyond the first on what the head made of the one before.

What proposers with a head (an `MtpConfig` or an `EagleConfig`) share. The head's layer is one more layer of the
target's pool: the entry at position p lies where the target has token p, so that blocks, prefixes and forks serve both.
An entry is made of the feature of the position before, which a step knows of its own tokens but the first; for that
one, a slot carries the features of the tokens that its sequence ran last. Where the position before is not among them,
as after a prefix that was found in the cache, the entry has no feature (zeros): that costs some accepted drafts and no
token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.layers.attention import attention, attention_state
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.rope import rope_tables
from metrale_jax.models.decoder import DecoderParams, Model, embedded
from metrale_jax.models.outline import first_index, outlined
from metrale_jax.models.proposer import Drafts, Wish
from metrale_jax.sampling.sample import draw, draw_among, is_hot
from metrale_jax.speculative.heads import HeadRows, draft_logits, entries, run_head, target_features, target_ids
from metrale_jax.speculative.rows import token_rows
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.paged import PagedKvSpec
from metrale_jax.state.pool import CarrySpec, Pool
from metrale_jax.steps.batches import uniform_batch

# Names in `Pool.carry`. The features are of `SPAN[1]` tokens from position `SPAN[0]` on.
FEATURES, SPAN = "features", "features_span"


def chain_states(head: Any, formats: StateFormats) -> tuple[tuple[PagedKvSpec, ...], ...]:
    """The keys and values of the head's one layer."""
    (layer,) = head.layer.mixers
    return ((attention_state(layer, formats),),)


def chain_carried(config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
    """The features of the last tokens that a sequence ran, as many as a row of drafts has, and where they begin."""
    shape = (num_drafts + 1, config.hidden_dim)
    return CarrySpec(FEATURES, shape, "float32"), CarrySpec(SPAN, (2,), "int32")


def take_in(
    head: Any,
    model: Model,
    params: DecoderParams,
    pool: Pool,
    batch: TokenBatch,
    hidden: Float[Array, "T D"],
    captured: tuple[Float[Array, "T D"], ...],
) -> Pool:
    """The pool with the head's keys and values of all tokens of a step, and the features of each sequence's last ones.

    Entries of drafts that are rejected are written over before they are read, as the target's are.
    """
    assert model.sharing is None, "heads run on one device"
    weights = params.drafter
    features = target_features(head, weights, hidden, captured)
    rows = token_rows(batch)
    slots = jnp.where(rows.real, rows.slots, 0)
    first = known_features(pool, slots, rows.starts).astype(features.dtype)
    before = jnp.where((rows.offsets == 0)[:, None], first, jnp.roll(features, 1, axis=0))
    x, _ = entries(head, weights, before, embedded(model, params, batch.tokens))
    group, index = _place(model)
    # Only the keys and values are wanted; compilers leave the rest out.
    _, kv = _attend(model, head, batch, pool.groups[group], index)(x, weights.layer.mixers[0], head.layer.mixers[0])
    return _with_features(_with_storage(pool, group, kv), batch, features)


def draft(
    head: Any,
    min_confidence: float,
    model: Model,
    params: DecoderParams,
    pool: Pool,
    state: SequenceState,
    limits: Int[Array, " S"],
    wish: Wish,
) -> tuple[Drafts, Pool]:
    """Up to `limits[s]` drafts a row, each drawn as the target will draw the token of its position.

    A row's drafts end before the first for which the head gives no token a probability of `min_confidence`.
    """
    assert model.sharing is None, "heads run on one device"
    group, index = _place(model)
    index = index + first_index(model.platform, state.seq_len)
    features = known_features(pool, state.recurrent_slot, state.seq_len).astype(params.embed.dtype)
    turn = outlined(Turn(head, min_confidence, model), model.platform)
    weights = params.replace(layers=(), final_norm=())
    kv, last, live = pool.groups[group], state.last_token, state.seq_len > 0
    lens, made = jnp.zeros_like(limits), []
    for number in range(wish.num_drafts):
        live = live & (number < limits)
        seq_len = jnp.where(live, state.seq_len + number, 0)
        at = state.replace(seq_len=seq_len, last_token=last, sampling=state.sampling.replace(extras=()))
        guess, kv = turn(weights, kv, index, at, features)
        live = live & guess.sure
        lens += live.astype(lens.dtype)
        last, features = guess.tokens, guess.features
        made.append(guess)
    tokens = jnp.stack([guess.tokens for guess in made], axis=1)
    scores = ()
    if wish.scores:
        each = [over_vocabulary(params.drafter, guess.scores, head.vocab_size) for guess in made]
        scores = jnp.stack(each, axis=1)
    return Drafts(tokens, lens, scores), _with_storage(pool, group, kv)


@struct.dataclass
class Guess:
    """What one turn gives of each row: `tokens [S]`, whether the head is `sure [S]` enough of them, the feature `[S,
    D]` that the next entry is made with, and `scores [S, Vd]` over the draft vocabulary."""

    tokens: Any
    sure: Any
    features: Any
    scores: Any


@dataclass(frozen=True)
class Turn:
    """One draft for each row, as a function of its static facts."""

    head: Any
    min_confidence: float
    model: Model

    def __call__(self, params: DecoderParams, kv, index, state: SequenceState, features: Float[Array, "S D"]):
        """A `Guess`, and the storage with the keys and values of entries at `seq_len`, of each row's last token and
        `features`. Rows of length 0 are padding."""
        model, head, weights = self.model, self.head, params.drafter
        none, zero = jnp.zeros((features.shape[0], 0), jnp.int32), jnp.zeros_like(state.seq_len)
        batch = uniform_batch(state, none, zero, model.layout.block_size)
        attend = _attend(model, head, batch, kv, index)
        embeds = embedded(model, params, batch.tokens)
        rows, kv = run_head(head, weights, features, embeds, attend, _placement(model, head))
        scores = _scores(head, params, rows)
        positions, sampling = state.seq_len + 1, state.sampling
        if isinstance(weights.token_ids, tuple):
            drawn = draw(scores, sampling, positions)
        else:
            drawn = draw_among(scores, weights.token_ids, head.vocab_size, sampling, positions)
        sure = confident(scores, sampling, self.min_confidence)
        return Guess(target_ids(weights, drawn), sure, rows.feedback, scores), kv


def confident(scores: Float[Array, "S Vd"], sampling: SamplingState, least: float) -> Bool[Array, " S"]:
    """Whether the greatest probability of each row, at its temperature or at 1 for greedy ones, is at least `least`.

    Not the probability of what was drawn: to leave out drafts for what they are would bias acceptance by rejection.
    """
    if least <= 0:
        return jnp.ones(scores.shape[0], bool)
    scaled = scores / jnp.where(is_hot(sampling), sampling.temperature, 1)[:, None]
    return jnp.max(scaled, axis=-1) - jax.nn.logsumexp(scaled, axis=-1) >= jnp.log(jnp.float32(least))


def over_vocabulary(weights, scores: Float[Array, "S Vd"], vocab: int) -> Float[Array, "S V"]:
    """Scores of a draft vocabulary as those of the target's; minus infinity for what it lacks."""
    if isinstance(weights.token_ids, tuple):
        return scores
    missing = jnp.full((scores.shape[0], vocab), -jnp.inf, scores.dtype)
    return missing.at[:, weights.token_ids].set(scores, mode="drop")


def known_features(pool: Pool, slots: Int[Array, " N"], lengths: Int[Array, " N"]) -> Float[Array, "N D"]:
    """The feature of the last of the first `lengths` tokens of the sequence in each slot; zeros where the slot does not
    carry it, and for slot 0."""
    kept = pool.carry[FEATURES]
    span = pool.carry[SPAN].at[slots].get(mode="clip")
    row = lengths - 1 - span[:, 0]
    known = (slots > 0) & (row >= 0) & (row < span[:, 1])
    found = kept.at[slots, jnp.where(known, row, 0)].get(mode="clip")
    return jnp.where(known[:, None], found, 0)


def _with_features(pool: Pool, batch: TokenBatch, features: Float[Array, "T D"]) -> Pool:
    """The pool that carries the features of each sequence's last tokens: of equal rows all, since it is not known yet
    where they end, and of a chunk the last."""
    kept, spans = pool.carry[FEATURES], pool.carry[SPAN]
    start = 0
    for segment in batch.segments:
        part, rows = features[start : start + segment.num_tokens], segment.state
        start += segment.num_tokens
        if segment.uniform:
            part = part.reshape(-1, rows.max_query_len, part.shape[-1])
            first, count = rows.starts, rows.query_lens
        else:
            part = part.at[rows.query_starts + rows.query_lens - 1].get(mode="clip")[:, None]
            first, count = rows.starts + rows.query_lens - 1, jnp.minimum(rows.query_lens, 1)
        if part.shape[1] > kept.shape[1]:
            raise ConfigError(
                f"rows of {part.shape[1]} tokens are more than the {kept.shape[1]} that this drafter keeps; make it "
                f"with num_drafts={part.shape[1] - 1}."
            )
        # Slot 0 is written by nobody.
        slots = jnp.where((rows.query_lens > 0) & (rows.slots > 0), rows.slots, kept.shape[0])
        kept = kept.at[slots, : part.shape[1]].set(part.astype(kept.dtype), mode="drop")
        spans = spans.at[slots].set(jnp.stack([first, count], axis=1), mode="drop")
    return pool.replace(carry={**pool.carry, FEATURES: kept, SPAN: spans})


def _scores(head, params: DecoderParams, rows: HeadRows) -> Float[Array, "S Vd"]:
    target_head = params.embed if isinstance(params.head, tuple) else params.head
    return draft_logits(head, params.drafter, rows.output, target_head)


def _place(model: Model) -> tuple[int, int]:
    """Group and index of the head's layer, which is numbered on from the target's."""
    ((group, index),) = model.layout.placement[len(model.config.layers)]
    return group, index


def _placement(model: Model, head) -> Placement:
    return Placement(_place(model)[0], head.norm_eps, model.platform, model.attention)


def _attend(model: Model, head, batch: TokenBatch, kv, index):
    """Attention over the head's paged past, as `run_head` calls it."""
    place = _placement(model, head)

    def attend(x, weights, config):
        rope = config.rope
        tables = () if rope is None else rope_tables(rope, batch.positions, batch.rope_lens)
        return attention(x, weights, config, tables, batch, kv, index, place)

    return attend


def _with_storage(pool: Pool, group: int, kv) -> Pool:
    return pool.replace(groups=(*pool.groups[:group], kv, *pool.groups[group + 1 :]))
