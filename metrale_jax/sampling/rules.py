# SPDX-License-Identifier: Apache-2.0
"""Rules that change logits before temperature: masks, early stops, penalties, bias.

Each applies to `Q` consecutive positions of a sequence as if their tokens came one at a time: position `j` looks back
on the history before it, the drafts in between included.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from metrale_jax.core.sequence import SamplingState


def ruled_logits(
    logits: Float[Array, "R V"], sampling: SamplingState, positions: Int[Array, "S Q"]
) -> Float[Array, "R V"]:
    """The logits that temperature and filters are applied to; a token that may not be drawn has minus infinity.

    Rows are the `Q` positions of the first sequence, then of the next: `R = S Q`.
    """
    allowed = _without_early_stops(logits, sampling, positions)
    if isinstance(sampling.extras, tuple):
        return allowed
    extras, vocab = sampling.extras, logits.shape[1]
    allowed = jnp.where(allowed_tokens(extras.mask, vocab, positions.shape[1]), allowed, -jnp.inf)
    repeats, counts = extras.repetition_penalty != 1, (extras.frequency_penalty != 0) | (extras.presence_penalty != 0)
    for any_row, rule in (
        (jnp.any(repeats), _less_repeated),
        (jnp.any(counts), _less_frequent),
        (jnp.any(extras.bias_ids < vocab), _biased),
    ):
        allowed = jax.lax.cond(any_row, partial(rule, extras=extras, positions=positions), lambda x: x, allowed)
    return allowed


def allowed_tokens(mask: UInt[Array, "..."], vocab: int, width: int) -> Bool[Array, "R V"]:
    """The bits of `[S, W]` words for each of `width` positions, or of `[S, width, W]` words, as rows of booleans."""
    words = repeated(mask, width) if mask.ndim == 2 else mask.reshape(-1, mask.shape[-1])
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] == 1


def repeated(leaf: Shaped[Array, "S ..."], width: int) -> Shaped[Array, "R ..."]:
    """Each row `width` times in a row."""
    return leaf if width == 1 else jnp.repeat(leaf, width, axis=0)


def _without_early_stops(logits, sampling, positions):
    width = positions.shape[1]
    early = (positions < sampling.min_len[:, None]).reshape(-1)

    def masked(x):
        rows = jnp.arange(x.shape[0])[:, None]
        ids = jnp.where(early[:, None], repeated(sampling.stop_ids, width), x.shape[1])
        return x.at[rows, ids].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(early), masked, lambda x: x, logits)


def _less_repeated(logits, extras, positions):
    # Keskar et al. 2019, as transformers has it for logits of either sign.
    start = jnp.where(extras.repetition_penalty != 1, 0, extras.history.shape[1])
    seen = occurrences(extras.history, start, positions, logits.shape[1]) > 0
    penalty = repeated(extras.repetition_penalty, positions.shape[1])[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def _less_frequent(logits, extras, positions):
    counts = occurrences(extras.history, extras.output_start, positions, logits.shape[1])
    frequency, presence = (
        repeated(column, positions.shape[1])[:, None] for column in (extras.frequency_penalty, extras.presence_penalty)
    )
    return logits - frequency * counts.astype(jnp.float32) - presence * (counts > 0).astype(jnp.float32)


def _biased(logits, extras, positions):
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    ids, values = (repeated(leaf, positions.shape[1]) for leaf in (extras.bias_ids, extras.bias_values))
    return logits.at[rows, ids].add(values, mode="drop")


def occurrences(
    history: Int[Array, "S C"], start: Int[Array, " S"], positions: Int[Array, "S Q"], vocab: int
) -> Int[Array, "R V"]:
    """How often each token stands in `history` from `start` up to each of `Q` consecutive positions, not included."""
    num_sequences, width = positions.shape
    rows = jnp.arange(num_sequences, dtype=jnp.int32)[:, None]
    place = jnp.arange(history.shape[1], dtype=jnp.int32)
    counted = (place >= start[:, None]) & (place < positions[:, :1])
    counts = jnp.zeros((num_sequences, vocab), jnp.int32)
    counts = counts.at[rows, jnp.where(counted, history, vocab)].add(1, mode="drop")
    if width == 1:
        return counts
    # Each position after the first counts one token more.
    place = positions[:, 1:] - 1
    token = history.at[rows, place].get(mode="fill", fill_value=vocab)
    more = jnp.zeros((num_sequences, width, vocab), jnp.int32)
    index = jnp.arange(1, width, dtype=jnp.int32)
    more = more.at[rows, index, jnp.where(place >= start[:, None], token, vocab)].add(1, mode="drop")
    return (counts[:, None] + jnp.cumsum(more, axis=1)).reshape(-1, vocab)
