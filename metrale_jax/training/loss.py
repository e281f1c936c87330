# SPDX-License-Identifier: Apache-2.0
"""What a head is trained to: the target's own distributions; and how often its guesses are the target's tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from metrale_jax.layers import embed as embedding
from metrale_jax.speculative.heads import HeadParams, draft_logits
from metrale_jax.training.unroll import Texts, in_text, shifted, unrolled

# How much each further turn counts: a guess is of use only where those before it were right.
TURN_WEIGHT = 0.8


def head_loss(
    config, params: HeadParams, texts: Texts, scorer: Float[Array, "Vd D"], num_turns: int, platform: str
) -> tuple[Float[Array, ""], Float[Array, " J"]]:
    """Cross-entropy to the target's distribution over the draft vocabulary, the mean over guesses that are asked for
    and over turns by weight, in nats; and each turn's share of guesses that are the target's likeliest of these.

    `scorer` are the target's head rows of the draft vocabulary.
    """
    rows, length, width = texts.hidden.shape
    flat = texts.hidden.reshape(-1, width)
    wanted = embedding.logits(flat, scorer, config.logit_scale, config.logit_softcap)
    wanted = wanted.reshape(rows, length, -1)
    chances, best = jax.nn.softmax(wanted), jnp.argmax(wanted, axis=-1)
    total, weights, right = jnp.zeros(()), 0.0, []
    for turn, output in enumerate(unrolled(config, params, texts, num_turns, platform)):
        scores = draft_logits(config, params, output.reshape(-1, width), scorer).reshape(rows, length, -1)
        asked = in_text(texts, turn).astype(jnp.float32)
        count = jnp.maximum(asked.sum(), 1)
        against = shifted(chances, turn)
        # Σ p log q, without an array of log q: log q = score - logsumexp(scores).
        lost = jax.nn.logsumexp(scores, axis=-1) - jnp.sum(against * scores, axis=-1)
        total = total + TURN_WEIGHT**turn * jnp.sum(lost * asked) / count
        weights += TURN_WEIGHT**turn
        hit = jnp.argmax(scores, axis=-1) == shifted(best, turn)
        right.append(jnp.sum(hit.astype(jnp.float32) * asked) / count)
    return total / weights, jnp.stack(right)


@struct.dataclass
class Accepted:
    """Of chains of guesses: `tried [J]`, how many reached turn j with all guesses before it right, and `right [J]`,
    how many of these guessed right again."""

    tried: Any
    right: Any


def acceptance(
    config,
    params: HeadParams,
    texts: Texts,
    scorer: Float[Array, "V D"],
    draws: tuple,
    num_turns: int,
    platform: str,
) -> Accepted:
    """How far chains of guesses agree with the target, whose whole head `scorer` is.

    `draws` are a temperature and a key: guess and token are each the highest logit after the same Gumbel noise, as in
    decoding. `()` is greedy. Chains go on along the texts, as if the texts' tokens had been accepted.
    """
    rows, length, width = texts.hidden.shape
    wanted = embedding.logits(texts.hidden.reshape(-1, width), scorer, config.logit_scale, config.logit_softcap)
    noise = jax.random.gumbel(draws[1], wanted.shape) * draws[0] if draws else jnp.zeros((1, 1))
    tokens = jnp.argmax(wanted + noise, axis=-1).reshape(rows, length)
    vocabulary = params.token_ids
    tried, right = [], []
    alive = jnp.ones((rows, length), bool)
    for turn, output in enumerate(unrolled(config, params, texts, num_turns, platform)):
        scores = draft_logits(config, params, output.reshape(-1, width), scorer)
        if draws:
            own = shifted(noise.reshape(rows, length, -1), turn).reshape(rows * length, -1)
            scores = scores + (own if isinstance(vocabulary, tuple) else own[:, vocabulary])
        guess = jnp.argmax(scores, axis=-1)
        guess = guess if isinstance(vocabulary, tuple) else vocabulary[guess]
        alive = alive & in_text(texts, turn)
        hit = alive & (guess.reshape(rows, length) == shifted(tokens, turn))
        tried.append(alive.sum())
        right.append(hit.sum())
        alive = hit
    return Accepted(jnp.stack(tried), jnp.stack(right))
