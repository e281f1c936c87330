# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: Gumbel-max with noise that depends on the request's seed and the token's position alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

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
    greedy = _likeliest(ruled)
    hot = sampling.temperature >= GREEDY_BELOW

    def sampled(_):
        scaled = ruled / jnp.where(hot, sampling.temperature, 1)[:, None]
        kept = survives(scaled, filter_limits(scaled, sampling, hot))
        noisy = jnp.where(kept, scaled + gumbel(sampling.seed, positions, ruled.shape[1]), -jnp.inf)
        return jnp.where(hot, _likeliest(noisy), greedy)

    return jax.lax.cond(jnp.any(hot), sampled, lambda _: greedy, None)


def drawable(ruled: Float[Array, "R V"]) -> Bool[Array, " R"]:
    """Whether the rules left a row any token; true for rows with NaN, which are reported as such."""
    return jnp.max(ruled, axis=-1) != -jnp.inf


def _likeliest(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    # The first index of the greatest score. Two plain reductions run in vector lanes; XLA's argmax, a reduction over
    # pairs, takes the CPU twice as long. Rows with NaN, which the step reports, get the last id.
    vocab = scores.shape[1]
    top = jnp.max(scores, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == top, ids, vocab - 1), axis=-1)


def gumbel(seeds: UInt[Array, " R"], positions: Int[Array, " R"], vocab: int) -> Float[Array, "R V"]:
    """Standard Gumbel noise, a row for each (seed, position)."""
    root = jax.random.key(ROOT_SEED)

    def row(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(root, seed), position), (vocab,), jnp.float32)

    return jax.vmap(row)(seeds, positions)


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
