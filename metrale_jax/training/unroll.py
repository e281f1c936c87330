# SPDX-License-Identifier: Apache-2.0
"""A head over whole texts, drafting on from every position at once ("training-time test", EAGLE-3, Li et al. 2025).

Turn 0 is what a head does with the target's features. In turn j the chain that began at position i has drafted j tokens
on its own feedback: its entry is at position i + j, and attends to the entries of turn 0 up to i and to those of its
own turns before. All chains go at once, row i of a turn's arrays being the chain that began at i.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.config import AttentionConfig
from metrale_jax.layers.attention import AttentionLayerParams
from metrale_jax.layers.linear import linear
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.rope import apply_rope, rope_tables
from metrale_jax.speculative.heads import HeadParams, run_head, target_features


@struct.dataclass
class Texts:
    """Rows `[R, L]` as in `Packed`, with what the target computed for them: `hidden [R, L, D]` final rows, `captured`
    the residual stream's, each as wide, and `embeds`, the embeddings of the tokens."""

    tokens: Any
    positions: Any
    owners: Any
    asked: Any
    hidden: Any
    captured: tuple
    embeds: Any


def unrolled(config, params: HeadParams, texts: Texts, num_turns: int, platform: str) -> list[Float[Array, "R L D"]]:
    """The head's output rows in each turn. Row i of turn j guesses token i + j + 1; it means nothing where that is
    past the end of i's text."""
    rows, length = texts.tokens.shape
    place = Placement(0, config.norm_eps, platform)
    flat = lambda array: array.reshape(rows * length, *array.shape[2:])  # noqa: E731
    features = target_features(config, params, flat(texts.hidden), tuple(map(flat, texts.captured)))
    # The feature of the position before; zeros where a text begins.
    before = jnp.roll(features.reshape(rows, length, -1), 1, axis=1)
    features = flat(jnp.where((texts.positions > 0)[..., None], before, jnp.zeros((), before.dtype)))
    outputs, keys = [], []
    for turn in range(num_turns):
        embeds = flat(shifted(texts.embeds, turn))
        attend = _Attend(texts, turn, keys)
        made, own = run_head(config, params, features, embeds, attend, place)
        keys = [*keys, own]
        outputs.append(made.output.reshape(rows, length, -1))
        features = made.feedback
    return outputs


def shifted(array: Array, by: int) -> Array:
    """Row i is what row i + by was, along axis 1; the last rows come round and mean nothing."""
    return jnp.roll(array, -by, axis=1) if by else array


def in_text(texts: Texts, turn: int) -> Array:
    """Where the guess of turn `turn` is one that is asked for, and of the text in which its chain began: bool
    `[R, L]`."""
    same = (shifted(texts.owners, turn) == texts.owners) & (texts.owners > 0)
    length = texts.tokens.shape[1]
    inside = jnp.arange(length) + turn < length
    return shifted(texts.asked, turn) & same & inside


class _Attend:
    """Attention of one turn, over all texts."""

    def __init__(self, texts: Texts, turn: int, keys: Sequence[tuple]):
        self.texts, self.turn, self.keys = texts, turn, keys

    def __call__(self, x, weights: AttentionLayerParams, attention: AttentionConfig):
        rows, length = self.texts.tokens.shape
        q, k, v = _projected(x, weights, attention, (self.texts.positions + self.turn).reshape(-1))
        q, k, v = (y.reshape(rows, length, *y.shape[1:]) for y in (q, k, v))
        group = attention.num_heads // attention.num_kv_heads
        q = q.reshape(rows, length, attention.num_kv_heads, group, -1) * attention.scale
        first, *own = [*self.keys, (k, v)]
        owners, index = self.texts.owners, jnp.arange(length)
        seen = (owners[:, :, None] == owners[:, None, :]) & (index[:, None] >= index)
        scores = jnp.einsum("rtkgh,rskh->rkgts", q, first[0])
        scores = jnp.where(seen[:, None, None], scores, -1e30)
        more = [jnp.einsum("rtkgh,rtkh->rkgt", q, one)[..., None] for one, _ in own]
        chances = jax.nn.softmax(jnp.concatenate([scores, *more], axis=-1), axis=-1)
        mixed = jnp.einsum("rkgts,rskh->rtkgh", chances[..., :length], first[1])
        for number, (_, values) in enumerate(own):
            share = jnp.moveaxis(chances[..., length + number], 3, 1)[..., None]
            mixed = mixed + share * values[:, :, :, None]
        return linear(mixed.reshape(rows * length, -1), weights.out), (k, v)


def _projected(x, weights: AttentionLayerParams, attention: AttentionConfig, positions: Int[Array, " T"]):
    tokens, width = x.shape[0], attention.head_dim
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    parts = jnp.split(linear(x, weights.qkv), [heads * width, (heads + kv_heads) * width], axis=-1)
    q, k, v = (part.reshape(tokens, -1, width) for part in parts)
    tables = rope_tables(attention.rope, positions, positions + 1)
    return apply_rope(q, *tables), apply_rope(k, *tables), v
