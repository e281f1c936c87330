# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: Gumbel-max with noise that depends on the request's seed and the token's position alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.params import GREEDY_BELOW
from metrale_jax.sampling.transforms import filter_limits, survives

ROOT_SEED = 0


def draw(ruled: Float[Array, "R V"], sampling: SamplingState, positions: Int[Array, " R"]) -> Int[Array, " R"]:
    """One token id a row from `ruled_logits`; `positions` says where in its sequence the token will stand.

    `token = argmax(filtered(logits / temperature) + gumbel(seed, position))`, or the likeliest where the temperature
    means greedy (Gumbel 1954; Maddison et al. 2014). The same row gives the same token in any batch. A row of minus
    infinity gives token 0, which `drawable` tells from a token that was drawn.
    """
    return _drawn(ruled, sampling, lambda: gumbel(sampling.seed, positions, ruled.shape[1]))


def draw_among(
    scores: Float[Array, "R C"],
    ids: Int[Array, " C"],
    vocab: int,
    sampling: SamplingState,
    positions: Int[Array, " R"],
) -> Int[Array, " R"]:
    """The column drawn of each row, where column c scores token `ids[c]` of a vocabulary of `vocab`: what `draw` gives
    if no other token may be drawn, since each has the noise that it has there."""
    return _drawn(scores, sampling, lambda: gumbel(sampling.seed, positions, vocab).at[:, ids].get(mode="clip"))


def _drawn(scores, sampling: SamplingState, noise: Callable):
    greedy = likeliest(scores)
    hot = is_hot(sampling)

    def sampled(_):
        noisy = filtered_logits(scores, sampling) + noise()
        return jnp.where(hot, likeliest(noisy), greedy)

    return jax.lax.cond(jnp.any(hot), sampled, lambda _: greedy, None)


def is_hot(sampling: SamplingState) -> Bool[Array, " R"]:
    """Which rows draw; the others take the likeliest token."""
    return sampling.temperature >= GREEDY_BELOW


def filtered_logits(ruled: Float[Array, "R V"], sampling: SamplingState) -> Float[Array, "R V"]:
    """The logits after temperature and filters, whose softmax tokens are drawn from; minus infinity for the filtered.

    It says nothing about rows that are not hot.
    """
    hot = is_hot(sampling)
    scaled = ruled / jnp.where(hot, sampling.temperature, 1)[:, None]
    return jnp.where(survives(scaled, filter_limits(scaled, sampling, hot)), scaled, -jnp.inf)


def drawable(ruled: Float[Array, "R V"]) -> Bool[Array, " R"]:
    """Whether the rules left a row any token; true for rows with NaN, which are reported as such."""
    return jnp.max(ruled, axis=-1) != -jnp.inf


def likeliest(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The first index of the greatest score; the last id for rows with NaN, which the step reports."""
    # Two plain reductions run in vector lanes; XLA's argmax, a reduction over pairs, takes the CPU twice as long.
    vocab = scores.shape[1]
    top = jnp.max(scores, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == top, ids, vocab - 1), axis=-1)


def gumbel(seeds: UInt[Array, " R"], positions: Int[Array, " R"], vocab: int) -> Float[Array, "R V"]:
    """Standard Gumbel noise, a row for each (seed, position)."""
    return jax.vmap(lambda s, p: jax.random.gumbel(noise_key(s, p), (vocab,), jnp.float32))(seeds, positions)


def noise_key(seed: UInt[Array, ""], position: Int[Array, ""]) -> Key[Array, ""]:
    """The key of all the noise of one token of a request."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(ROOT_SEED), seed), position)


def chosen_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], num_top: int
) -> tuple[Float[Array, " R"], Int[Array, "R k"], Float[Array, "R k"]]:
    """Log-probabilities of the chosen tokens; ids and log-probabilities of the `num_top` likeliest; of raw logits."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - total
    top, ids = jax.lax.top_k(logits, num_top)
    return chosen, ids.astype(jnp.int32), top - total[:, None]


def score_rows(
    logits: Float[Array, "R V"], targets: Int[Array, " R"], num_top: int
) -> tuple[Float[Array, " R"], Int[Array, " R"], Int[Array, "R k"], Float[Array, "R k"]]:
    """`chosen_logprobs` of `targets` with, second, their ranks: 1 for the likeliest, ties with the best of them."""
    logprobs, ids, top = chosen_logprobs(logits, targets, num_top)
    own = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32)
    return logprobs, ranks, ids, top
